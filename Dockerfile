# A worker, or with EXTRAS=exporter just the light commands. CPU by default; for a GPU:
#   docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
FROM python:3.12-slim AS build
ARG EXTRAS=worker
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY producer producer
COPY engine engine
COPY kernels kernels
COPY worker worker
COPY monitoring monitoring
# Last: it leads to the folders above by symbolic links.
COPY pagemill pagemill
RUN python -m venv /opt/pagemill \
 && /opt/pagemill/bin/pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" ".[${EXTRAS}]"

FROM python:3.12-slim
# Triton compiles a small launcher the first time a kernel runs on a GPU.
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 pagemill \
 && install -d -o pagemill /models /var/cache/pagemill
COPY --from=build /opt/pagemill /opt/pagemill
ENV PATH=/opt/pagemill/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PAGEMILL_CACHE_DIR=/var/cache/pagemill \
    PAGEMILL_HTTP_HOST=0.0.0.0
USER pagemill
EXPOSE 9790
# SIGTERM drains: running jobs go on for a while, the rest is handed back. Give it 30 s.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9790/healthz', timeout=4)"]
ENTRYPOINT ["pagemill"]
CMD ["worker"]
