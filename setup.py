"""Packaging. requirements/ pins tested sets of versions; xhf_hooks/system/versions.py says what can work at all."""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r"__version__ = '(.+)'", (HERE / 'xhf_hooks' / 'system' / 'versions.py').read_text())[1]

#: Where this is hosted, as the release job says: links of the description lead there. Unset, they stay relative.
REPOSITORY = os.environ.get('XHF_HOOKS_REPOSITORY', '')
README = (HERE / 'README.md').read_text(encoding='utf-8')
URLS = {}
if REPOSITORY:
    README = re.sub(r'(?<=\]\()(?=[^):#]+[):#])(?!https?:)', f'{REPOSITORY}/blob/v{VERSION}/', README)
    README = re.sub(rf'(?<=\]\({re.escape(REPOSITORY)})/blob(?=[^)]*\.svg\))', '/raw', README)
    URLS = {
        'Source': REPOSITORY,
        'Documentation': f'{REPOSITORY}/blob/v{VERSION}/docs/index.md',
        'Changelog': f'{REPOSITORY}/blob/v{VERSION}/CHANGELOG.md',
        'Issues': f'{REPOSITORY}/issues',
    }

#: Of a machine that has no trainer: the bounds of xhf_hooks/system/versions.py.
CONVERT = ['transformers>=4.36', 'safetensors>=0.4.3', 'huggingface_hub>=0.20']
MMENGINE = [*CONVERT, 'mmengine>=0.10.3']

setup(
    name='xhf_hooks',
    version=VERSION,
    description='Hugging Face checkpoints out of live DeepSpeed ZeRO and FSDP training, or from its old files',
    long_description=README,
    long_description_content_type='text/markdown',
    author='The xhf_hooks authors',
    project_urls=URLS,
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
            'xhf-convert = xhf_hooks.offline.commands.convert:main',
            'xhf-verify = xhf_hooks.offline.commands.verify:main',
        ]
    },
    python_requires='>=3.10',
    # Names alone: pip would replace an installed package that is below a bound, and a trainer's torch with it. Not
    # transformers: where it is missing, the newest one would replace an older huggingface_hub. What cannot work is
    # refused by name when a run or a command starts (system/versions.py). The extras install what is missing.
    # isal computes checksums (format/checksum.py)
    install_requires=['torch', 'numpy', 'isal'],
    extras_require={
        'convert': CONVERT,
        'mmengine': MMENGINE,
        # The DeepSpeedStrategy of mmengine 0.10.7 imports deepspeed.runtime.fp16.onebit, which 0.19.7 removed
        'deepspeed': [*MMENGINE, 'deepspeed>=0.13,<0.19.7'],
        'trainer': [*CONVERT, 'accelerate>=1.0'],
        # Converting and comparing LoRA checkpoints
        'peft': ['peft>=0.7'],
        # upload_to and addresses of stores; fsspec itself comes with torch
        's3': ['s3fs>=2024.6'],
        'gcs': ['gcsfs>=2024.6'],
        'azure': ['adlfs>=2024.4'],
        'oss': ['ossfs>=2023.12'],
        'docs': ['sphinx>=8', 'myst-parser>=4', 'furo'],
        'test': ['pytest>=8', 'ruff>=0.6', 'hypothesis>=6', 'mypy>=1.11', 'codespell>=2.3'],
        # XTuner is no extra: it pins a bitsandbytes that does not import beside torch's CUDA build, and it cannot be
        # installed by name without it (docs/versions.md)
    },
)
