# megarl with everything that it runs on NVIDIA GPUs: docker build -t megarl . (docs/install.md, also for how to start it)
# The environment is made by the script that makes it everywhere else, from requirements/gpu.txt.

# CUDA 13.0, for which PyPI's torch is built, without cuDNN: TransformerEngine would take the image's in place of the lock's
# and fail. The toolkit stays in the image: SGLang's kernels compile as they are needed.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04@sha256:7d2f6a8c2071d911524f95061a0db363e24d27aa51ec831fcccf9e76eb72bc92 AS base
ENV CUDA_HOME=/usr/local/cuda MEGARL_DEVICE=cuda
RUN apt-get update && \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        bubblewrap g++ ibverbs-providers iproute2 libibverbs1 libnuma1 librdmacm1 python3.12 python3.12-dev python3.12-venv && \
    rm -rf /var/lib/apt/lists/*
WORKDIR /opt/megarl

FROM base AS environment
COPY requirements requirements
COPY scripts/setup_env.sh scripts/setup_env.sh
COPY setup.py pyproject.toml ./
# Of the package its name alone: the environment stays as it is when the code changes.
COPY megarl/__init__.py megarl/__init__.py
RUN PIP_NO_CACHE_DIR=1 bash -c 'source scripts/setup_env.sh'
# Step 4 of docs/install.md, for what is trained with Megatron's own layers: docker build --build-arg APEX=1 .
ARG APEX=0
ARG APEX_COMMIT=10417aceddd7d5d05d7cbf7b0fc2daad1105f8b4
RUN if [ "$APEX" = 1 ]; then \
        apt-get update && apt-get install -y --no-install-recommends git && \
        git clone https://github.com/NVIDIA/apex /tmp/apex && git -C /tmp/apex checkout "$APEX_COMMIT" && \
        TORCH_CUDA_ARCH_LIST=9.0 .venv/bin/python -m pip install --no-cache-dir --no-deps --no-build-isolation \
            --config-settings "--build-option=--cpp_ext --cuda_ext" /tmp/apex; \
    fi

FROM base
COPY --from=environment /opt/megarl /opt/megarl
COPY . .
RUN .venv/bin/python -m compileall -q megarl
ENV PATH=/opt/megarl/.venv/bin:$PATH
CMD ["megarl", "--help"]
