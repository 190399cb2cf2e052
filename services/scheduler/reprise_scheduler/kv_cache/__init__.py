"""The KV cache manager: a pure package that imports only reprise_core.

manager         what the scheduler calls; nothing else is needed from outside
config, group   the groups of layers and their arithmetic
request         what is read of a request, what is kept for it, and what a look-up gives
block_pool      reference counts and hash entries of all blocks
free_queue      the order in which free blocks are taken; `eviction` has that of cached ones
hash_index      from a hash to its holders
coordinator     the longest prefix valid in every group; lookup_full, lookup_sliding, lookup_chunked
prefix_lookup   the search with what is optional around it
block_tables    what requests need, adopt, take and let go
caching         which full blocks get entries, and when; `retention` for windows
event_log       KV events, in order
stats           counters

Off unless asked for: miss_reasons, verification, pins, tenant_shares, policy_loading; `observer` is how
they watch.
"""
