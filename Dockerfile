# The images of Reprise: one target per service, and `redis`.
#
#   docker build --target store --tag reprise-store .
#
# The third-party packages are in a layer of their own, made again only when pyproject.toml asks for others.
# Wheels in .cache/compose/wheels, where there are any, are used instead of a package index.
# Builds with BuildKit and with the classic builder.

# Any Debian with Python 3.11 or newer as `python3`, with pip and venv.
ARG BASE_IMAGE=python:3.11-slim

# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS requirements
WORKDIR /requirements
COPY pyproject.toml .
# common.txt, one file per extra, torch.txt (a layer of its own, being the largest), build.txt.
RUN python3 -c "import pathlib, tomllib; \
    content = tomllib.loads(pathlib.Path('pyproject.toml').read_text()); \
    project = content['project']; \
    extras = project['optional-dependencies']; \
    torch = [name for name in extras['worker'] if name.startswith('torch=')]; \
    files = {**extras, 'common': project['dependencies'], 'torch': torch, 'build': content['build-system']['requires']}; \
    [pathlib.Path(f'{name}.txt').write_text('\n'.join([*lines, ''])) for name, lines in files.items()]"

# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS build
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off
WORKDIR /src
RUN python3 -m venv /opt/venv
# LICENSE is named because a COPY needs a source when there are no wheels.
COPY LICENSE .cache/compose/wheel[s] /wheels/
RUN if ls /wheels/*.whl >/dev/null 2>&1; then printf '[global]\nno-index = true\nfind-links = /wheels\n' >/etc/pip.conf; fi

FROM build AS common-dependencies
COPY --from=requirements /requirements/common.txt .
RUN pip install -r common.txt

FROM build AS code
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY shared shared

# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS runtime
# /run/reprise: where store and worker meet to share memory, when a volume is mounted there in both.
RUN groupadd --gid 10001 reprise && useradd --uid 10001 --gid 10001 --no-log-init --create-home reprise \
    && install -d -o 10001 -g 10001 -m 700 /run/reprise
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/opt/reprise PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY tests/compose/check_image.py /opt/
WORKDIR /home/reprise
# READY_PORT is where a service's image has /readyz. A large model takes minutes to load; the start period ends
# with the first success.
HEALTHCHECK --interval=3s --timeout=3s --start-period=600s --retries=3 CMD ["bash", "-c", \
    "exec 3<>/dev/tcp/127.0.0.1/$READY_PORT; printf 'GET /readyz HTTP/1.0\\r\\n\\r\\n' >&3; read -r _ status _ <&3; cat <&3 >/dev/null; [ \"$status\" = 200 ]"]

# --- scheduler

FROM code AS scheduler-code
COPY services/scheduler services/scheduler
RUN pip install --no-deps --target /opt/reprise .

FROM runtime AS scheduler
COPY --from=common-dependencies /opt/venv /opt/venv
COPY --from=scheduler-code /opt/reprise /opt/reprise
USER 10001:10001
RUN python /opt/check_image.py scheduler
ENV READY_PORT=9203 \
    REPRISE_SCHEDULER_METRICS_ADDRESS=0.0.0.0:9203 \
    REPRISE_SCHEDULER_LISTEN_ADDRESS=0.0.0.0:50052 \
    REPRISE_SCHEDULER_WORKERS_ENDPOINT=tcp://0.0.0.0:5760
EXPOSE 50052 5760 9203
CMD ["python", "-m", "reprise_scheduler"]

# --- publisher

FROM common-dependencies AS publisher-dependencies
COPY --from=requirements /requirements/publisher.txt .
RUN pip install -r common.txt -r publisher.txt

FROM code AS publisher-code
COPY services/publisher services/publisher
RUN pip install --no-deps --target /opt/reprise .

FROM runtime AS publisher
COPY --from=publisher-dependencies /opt/venv /opt/venv
COPY --from=publisher-code /opt/reprise /opt/reprise
USER 10001:10001
RUN python /opt/check_image.py publisher
ENV READY_PORT=9206 \
    REPRISE_PUBLISHER_METRICS_ADDRESS=0.0.0.0:9206 \
    REPRISE_PUBLISHER_LISTEN_ADDRESS=0.0.0.0:50054 \
    REPRISE_PUBLISHER_INTAKE_ENDPOINT=tcp://0.0.0.0:5761
EXPOSE 50054 5761 5557 5657 9206
CMD ["python", "-m", "reprise_publisher"]

# --- store

FROM common-dependencies AS store-dependencies
COPY --from=requirements /requirements/store.txt .
RUN pip install -r common.txt -r store.txt

FROM code AS store-code
COPY services/store services/store
RUN pip install --no-deps --target /opt/reprise .

FROM runtime AS store
COPY --from=store-dependencies /opt/venv /opt/venv
COPY --from=store-code /opt/reprise /opt/reprise
USER 10001:10001
RUN python /opt/check_image.py store
ENV READY_PORT=9205 \
    REPRISE_STORE_METRICS_ADDRESS=0.0.0.0:9205 \
    REPRISE_STORE_LISTEN_ADDRESS=0.0.0.0:50053 \
    REPRISE_STORE_BLOCKS_ENDPOINT=tcp://0.0.0.0:5770
EXPOSE 50053 5770 9205
CMD ["python", "-m", "reprise_store"]

# --- tokenizer

FROM common-dependencies AS tokenizer-dependencies
COPY --from=requirements /requirements/tokenizer.txt .
RUN pip install -r common.txt -r tokenizer.txt

FROM code AS tokenizer-code
COPY services/tokenizer services/tokenizer
RUN pip install --no-deps --target /opt/reprise .

FROM runtime AS tokenizer
COPY --from=tokenizer-dependencies /opt/venv /opt/venv
COPY --from=tokenizer-code /opt/reprise /opt/reprise
USER 10001:10001
RUN python /opt/check_image.py tokenizer
# hadolint ignore=DL3064
ENV READY_PORT=9202 \
    REPRISE_TOKENIZER_METRICS_ADDRESS=0.0.0.0:9202 \
    REPRISE_TOKENIZER_LISTEN_ADDRESS=0.0.0.0:50051
EXPOSE 50051 9202
CMD ["python", "-m", "reprise_tokenizer"]

# --- gateway

FROM common-dependencies AS gateway-dependencies
COPY --from=requirements /requirements/gateway.txt .
RUN pip install -r common.txt -r gateway.txt

FROM code AS gateway-code
COPY services/gateway services/gateway
RUN pip install --no-deps --target /opt/reprise .

FROM runtime AS gateway
COPY --from=gateway-dependencies /opt/venv /opt/venv
COPY --from=gateway-code /opt/reprise /opt/reprise
USER 10001:10001
RUN python /opt/check_image.py gateway
ENV READY_PORT=9201 \
    REPRISE_GATEWAY_METRICS_ADDRESS=0.0.0.0:9201 \
    REPRISE_GATEWAY_LISTEN_ADDRESS=0.0.0.0:8000
EXPOSE 8000 9201
CMD ["python", "-m", "reprise_gateway"]

# --- worker: the only one with torch. It also prepares models (python -m reprise_worker.prepare).

FROM common-dependencies AS worker-dependencies
# Where torch comes from; empty = the usual index, which on Linux gives a CUDA build of several GB.
ARG TORCH_INDEX=
COPY --from=requirements /requirements/torch.txt .
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -r torch.txt
COPY --from=requirements /requirements/worker.txt .
RUN pip install -r common.txt -r worker.txt

FROM code AS worker-code
COPY services/worker services/worker
RUN pip install --no-deps --target /opt/reprise .

FROM runtime AS worker
COPY --from=worker-dependencies /opt/venv /opt/venv
COPY --from=worker-code /opt/reprise /opt/reprise
# A volume mounted on /models takes its owner from here.
RUN install --directory --owner=10001 --group=10001 /models
USER 10001:10001
RUN python /opt/check_image.py worker
ENV READY_PORT=9204 \
    HF_HOME=/tmp/huggingface \
    REPRISE_WORKER_METRICS_ADDRESS=0.0.0.0:9204
EXPOSE 9204
CMD ["python", "-m", "reprise_worker"]

# --- redis: the external block storage, shared by all engines

# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS redis
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/*
# hadolint ignore=DL3066
USER redis
HEALTHCHECK --interval=3s --timeout=3s --start-period=10s --retries=3 CMD ["redis-cli", "ping"]
EXPOSE 6379
CMD ["redis-server", "--bind", "0.0.0.0", "--protected-mode", "no", "--save", "", "--appendonly", "no", \
    "--dir", "/tmp", "--maxmemory", "1gb", "--maxmemory-policy", "volatile-lru"]
