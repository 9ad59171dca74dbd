"""Packaging. Tested version sets are pinned in requirements/; the bounds here say what can work at all."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = (HERE / 'xhf_hooks' / 'version.py').read_text().split("'")[1]

MMENGINE = ['mmengine>=0.10.6']

setup(
    name='xhf_hooks',
    version=VERSION,
    description='Hugging Face checkpoints out of live DeepSpeed ZeRO and FSDP training, or from its old files',
    long_description=(HERE / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    license_files=['LICENSE'],
    keywords=['deepspeed', 'zero', 'fsdp', 'huggingface', 'safetensors', 'checkpoint', 'mmengine', 'xtuner', 'llm'],
    classifiers=[
        'Development Status :: 4 - Beta',
        'Intended Audience :: Developers',
        'Intended Audience :: Science/Research',
        'Operating System :: POSIX :: Linux',
        'Programming Language :: Python :: 3',
        'Programming Language :: Python :: 3 :: Only',
        *(f'Programming Language :: Python :: 3.{minor}' for minor in range(10, 15)),
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
        'Typing :: Typed',
    ],
    packages=find_packages(include=['xhf_hooks', 'xhf_hooks.*']),
    package_data={'xhf_hooks': ['py.typed']},
    entry_points={
        'console_scripts': [
            'xhf = xhf_hooks.cli.main:main',
            # The names that scripts may have
            'xhf-convert = xhf_hooks.cli.convert:main',
            'xhf-verify = xhf_hooks.cli.verify:main',
        ]
    },
    python_requires='>=3.10',
    # What every frontend and command needs. The trainers that a run is made with come with the extras.
    install_requires=[
        'torch>=2.6',
        'numpy>=1.26',
        'transformers>=4.48',
        'safetensors>=0.4.3',
        'isal>=1.6',
        'huggingface_hub>=0.26',
    ],
    extras_require={
        'mmengine': MMENGINE,
        # mmengine 0.10.7 imports deepspeed.runtime.fp16.onebit, which 0.19.7 removed.
        'deepspeed': [*MMENGINE, 'deepspeed>=0.16.2,<0.19.7'],
        'trainer': ['accelerate>=1.2'],
        # Converting and comparing LoRA checkpoints
        'peft': ['peft>=0.14'],
        # upload_to and addresses of stores; fsspec itself comes with torch
        's3': ['s3fs>=2024.6'],
        'gcs': ['gcsfs>=2024.6'],
        'azure': ['adlfs>=2024.4'],
        'oss': ['ossfs>=2023.12'],
        'docs': ['codespell>=2.3'],
        'test': ['pytest>=8', 'ruff>=0.6', 'hypothesis>=6', 'mypy>=1.11', 'codespell>=2.3'],
        # XTuner is no extra: it pins a bitsandbytes that does not import beside torch's CUDA build, and it cannot be
        # installed by name without it (docs/versions.md)
    },
)
