"""Packaging. Tested version sets are pinned in requirements/; the bounds here say what can work at all."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = (HERE / 'xhf_hooks' / 'version.py').read_text().split("'")[1]

setup(
    name='xhf_hooks',
    version=VERSION,
    description='Hugging Face checkpoints out of live DeepSpeed ZeRO training with MMEngine',
    long_description=(HERE / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    packages=find_packages(include=['xhf_hooks', 'xhf_hooks.*']),
    package_data={'xhf_hooks': ['py.typed']},
    entry_points={
        'console_scripts': [
            'xhf-convert = xhf_hooks.cli.convert:main',
            'xhf-verify = xhf_hooks.cli.verify:main',
        ]
    },
    python_requires='>=3.10',
    install_requires=[
        'torch>=2.6',
        'mmengine>=0.10.6',
        'transformers>=4.48',
        'safetensors>=0.4.3',
        'isal>=1.6',
        'huggingface_hub>=0.26',
        # mmengine 0.10.7 imports deepspeed.runtime.fp16.onebit, which 0.19.7 removed.
        'deepspeed>=0.16.2,<0.19.7',
    ],
    extras_require={
        # XTuner is no extra: what it pins does not import beside torch's CUDA build (docs/versions.md)
        'test': ['pytest>=8', 'ruff>=0.6', 'hypothesis>=6'],
    },
)
