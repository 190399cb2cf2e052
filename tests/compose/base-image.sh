#!/usr/bin/env bash
# Makes a base image for the Dockerfile from Debian packages, for machines that get no images from elsewhere.
#
#   tests/compose/base-image.sh TAG
#
# The image is Debian 12 with its Python 3.11, pip and venv. An existing TAG is kept; FORCE=1 makes it anew.
# Needs root, debootstrap and a running Docker engine. The mirror is the one that this machine's apt uses;
# DEBIAN_MIRROR=URL names another.
set -euo pipefail
SUITE=bookworm
tag=${1:?usage: base-image.sh TAG}

if [ "${FORCE:-0}" != 1 ] && docker image inspect "$tag" >/dev/null 2>&1; then
    echo "base image: kept $tag (FORCE=1 makes it anew)"
    exit 0
fi

# This suite's own source where there is one; else the main archive, which carries other suites too.
mirror_for() {
    apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "$@" | grep -v security | sort -u | head -n 1
}
mirror=${DEBIAN_MIRROR:-$(mirror_for "Codename: $SUITE" || true)}
mirror=${mirror:-$(mirror_for || true)}
[ -n "$mirror" ] || { echo "base image: apt has no source here; set DEBIAN_MIRROR" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
root=$work/root
# What the services' wheels and an init process need, beside the interpreter.
packages=python3,python3-venv,python3-pip,ca-certificates,libgomp1,tini
debootstrap --variant=minbase --include="$packages" "$SUITE" "$root" "$mirror" >"$work/log" 2>&1 \
    || { tail -n 30 "$work/log" >&2; exit 1; }

# What a stock Python image has: "python" on the PATH, and a pip that may install.
ln -s python3 "$root/usr/bin/python"
rm -f "$root"/usr/lib/python3*/EXTERNALLY-MANAGED
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/cache/debconf/* "$root"/var/log/* \
    "$root"/usr/share/{doc,man,locale,info}/*
mkdir -p "$root"/var/cache/apt/archives/partial "$root"/var/lib/apt/lists/partial
find "$root/usr/lib" -name __pycache__ -type d -prune -exec rm -rf {} +
# No downloaded packages in later layers, and no service is started by an installation.
cat >"$root/etc/apt/apt.conf.d/docker-clean" <<'CONF'
DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/archives/partial/*.deb /var/cache/apt/*.bin || true"; };
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
Acquire::Languages "none";
CONF
printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
chmod 755 "$root/usr/sbin/policy-rc.d"
# Nothing of this machine stays in it.
: >"$root/etc/resolv.conf"
echo localhost >"$root/etc/hostname"

tar -C "$root" --numeric-owner --one-file-system -c . | docker import \
    -c 'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin' -c 'ENV LANG=C.UTF-8' \
    -c 'CMD ["python3"]' - "$tag" >/dev/null
docker image inspect -f 'base image: made {{join .RepoTags ", "}}, {{.Size}} bytes' "$tag"
