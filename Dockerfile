# docker build --tag adclr .
# docker run --rm --gpus all --shm-size 8g --volume "$PWD:/work" adclr pretrain photos/ --out runs/photos
# On a CPU: docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu --tag adclr .
FROM python:3.12-slim
ARG TORCH_INDEX=https://pypi.org/simple
# Triton compiles a launcher of its kernels with the C compiler
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/adclr
COPY constraints.txt pyproject.toml hatch_build.py README.md LICENSE CITATION.cff ./
COPY src src
COPY studies studies
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" --constraint constraints.txt ".[embed,explore,multiband,timm]"
WORKDIR /work
ENTRYPOINT ["adclr"]
CMD ["--help"]
