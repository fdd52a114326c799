# A learner or an environment. Shared memory is sized where a container starts: docker run --shm-size=16g, see docs/how-to/docker.md
FROM python:3.12-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM python:3.12-slim-bookworm
# what the image is for: EXTRAS=atropos,learner,launch
ARG EXTRAS=launch
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "shmbridge[$EXTRAS] @ file://$(ls /wheels/shmbridge-*.whl)" && rm -r /wheels \
    && useradd --uid 1000 --create-home shmbridge \
    && install --directory --owner=1000 --group=1000 /runs
USER 1000
WORKDIR /home/shmbridge
CMD ["shmbridge", "doctor"]
