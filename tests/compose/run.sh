#!/usr/bin/env bash
# The system on Docker, built and run for real: images, `docker compose up`, tests over HTTP, and down again.
#
#   tests/compose/run.sh [PYTEST ARGUMENT...]          (make test-compose)
#
# Ends with 0 only when the tests ran and passed. Where an engine, the base image, the wheels or Compose cannot be
# had it says why, leaves the reason in .cache/compose/unavailable, and ends with 77. See README.md beside this file.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=tests/compose
cache=$PWD/.cache/compose
mkdir -p "$cache"
rm -f "$cache/unavailable"
started=$SECONDS
stage_started=$SECONDS
engine_pid=
up=

stage() { # NAME OF WHAT ENDED
    echo "--- $1: $((SECONDS - stage_started)) s"
    stage_started=$SECONDS
}

unavailable() { # REASON
    echo "$1" >"$cache/unavailable"
    echo "test-compose: did not run: $1" >&2
    exit 77
}

clean_up() {
    status=$?
    trap - EXIT
    if [ -n "$up" ]; then
        [ "$status" = 0 ] || { compose ps --all; compose logs --no-color --tail 60; } 2>&1 || true
        compose down --volumes --timeout 15 >"$cache/down.log" 2>&1 || cat "$cache/down.log" >&2
        stage "compose down"
    fi
    if [ -n "$engine_pid" ]; then
        kill "$engine_pid" 2>/dev/null || true
        wait "$engine_pid" 2>/dev/null || true
    fi
    exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

engine_answers() { timeout 20 docker info >/dev/null 2>&1; }

install_packages() { # PACKAGE...
    { apt-get update && apt-get install -y --no-install-recommends "$@"; } >"$cache/apt.log" 2>&1
}

start_engine() {
    command -v docker >/dev/null && engine_answers && return
    [ "$(id -u)" = 0 ] || unavailable "no Docker engine answers, and only root can start one"
    if ! command -v dockerd >/dev/null; then
        command -v apt-get >/dev/null || unavailable "there is no Docker engine, and no apt-get to install one"
        install_packages docker.io || unavailable "apt-get cannot install docker.io: $(tail -n 1 "$cache/apt.log")"
    fi
    # A session of its own: Ctrl-C must not stop it before the containers are gone.
    setsid dockerd >"$cache/dockerd.log" 2>&1 </dev/null &
    engine_pid=$!
    for _ in $(seq 120); do
        engine_answers && return
        kill -0 "$engine_pid" 2>/dev/null || break
        sleep 0.5
    done
    unavailable "dockerd does not start: $(tail -n 1 "$cache/dockerd.log")"
}

choose_base_image() {
    [ -z "${BASE_IMAGE:-}" ] || return 0
    if [ "$(id -u)" = 0 ] && { command -v debootstrap >/dev/null || install_packages debootstrap; }; then
        BASE_IMAGE=reprise-base:bookworm
        $here/base-image.sh "$BASE_IMAGE" || unavailable "the base image cannot be made here"
    else
        BASE_IMAGE=python:3.11-slim
        docker image inspect $BASE_IMAGE >/dev/null 2>&1 || docker pull --quiet $BASE_IMAGE \
            || unavailable "there is no base image: $BASE_IMAGE cannot be pulled"
    fi
}

compose() { docker compose --file docker-compose.yml --file $here/offline.override.yml "$@"; }

find_compose() {
    docker compose version >/dev/null 2>&1 && return
    $here/tools.sh .tools/bin compose || unavailable "Docker Compose cannot be had here"
    # The client finds its plugins in its configuration folder.
    export DOCKER_CONFIG=$PWD/.tools/docker
    mkdir -p "$DOCKER_CONFIG/cli-plugins"
    ln -sf "$PWD/.tools/bin/docker-compose" "$DOCKER_CONFIG/cli-plugins/docker-compose"
    docker compose version
}

free_ports() { # COUNT
    python3 - "$1" <<'PY'
import socket
import sys

sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(held.getsockname()[1] for held in sockets))
PY
}

start_engine
stage "Docker engine"
choose_base_image
export BASE_IMAGE
stage "base image"
$here/wheelhouse.sh || unavailable "the package index does not give the wheels"
stage "wheelhouse"
find_compose
stage "compose"

export COMPOSE_PROJECT_NAME=reprise-test-$$ REPRISE_TAG=test DEV_MODE=true MODEL= REPRISE_COMPOSE_TEST=1
read -r HTTP_PORT EVENTS_PORT REPLAY_PORT GATEWAY_METRICS_PORT TOKENIZER_METRICS_PORT SCHEDULER_METRICS_PORT \
    WORKER_METRICS_PORT STORE_METRICS_PORT PUBLISHER_METRICS_PORT <<<"$(free_ports 9)"
export HTTP_PORT EVENTS_PORT REPLAY_PORT GATEWAY_METRICS_PORT TOKENIZER_METRICS_PORT SCHEDULER_METRICS_PORT \
    WORKER_METRICS_PORT STORE_METRICS_PORT PUBLISHER_METRICS_PORT

compose build >"$cache/build.log" 2>&1 || { tail -n 60 "$cache/build.log" >&2; exit 1; }
stage "images"
up=1
compose --progress quiet up --detach --wait --wait-timeout 600
stage "compose up, the model's conversion included"
.venv/bin/python -m pytest $here -q "$@"
stage "tests"
echo "test-compose: passed in $((SECONDS - started)) s"
