"""Which eviction policy the settings ask for."""

from functools import partial

from reprise_core.errors import InvalidInput
from reprise_scheduler.kv_cache.policy_loading import load_policy
from reprise_scheduler.kv_cache.tenant_shares import TenantShares
from reprise_scheduler.sched.state import PolicyMaker
from reprise_scheduler.settings import SchedulerSettings


def policy_maker(settings: SchedulerSettings) -> PolicyMaker | None:
    """Made once for each pool; None = least recently used. Raises InvalidInput at start, not later."""
    maker: PolicyMaker
    if settings.eviction_policy:
        if settings.tenant_shares:
            raise InvalidInput("tenant_shares", "cannot be set together with eviction_policy")
        maker = partial(load_policy, settings.eviction_policy)
    elif settings.tenant_shares:
        maker = partial(TenantShares, shares=settings.tenant_shares)
    else:
        return None
    maker(2)  # the smallest pool: says now what is wrong
    return maker
