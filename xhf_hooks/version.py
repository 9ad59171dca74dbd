__version__ = '0.1.0'


def package_versions() -> dict[str, str]:
    """Versions of the packages in use, for the manifest."""
    from importlib.metadata import version

    return {'xhf_hooks': __version__, **{name: version(name) for name in ('torch', 'transformers')}}
