# docker build --tag adclr .
# docker run --rm --gpus all --shm-size 8g --volume "$PWD:/work" adclr pretrain photos/ --out runs/photos
# Options of pip, such as an index with PyTorch for CPUs alone: docker build --build-arg PIP_OPTIONS="--extra-index-url URL" ...
FROM python:3.12-slim
ARG PIP_OPTIONS=""
# Triton compiles a launcher of its kernels with the C compiler
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/adclr
COPY constraints.txt pyproject.toml hatch_build.py README.md LICENSE CITATION.cff ./
COPY src src
COPY studies studies
RUN pip install --no-cache-dir $PIP_OPTIONS --constraint constraints.txt ".[embed,explore,multiband,timm]"
WORKDIR /work
ENTRYPOINT ["adclr"]
CMD ["--help"]
