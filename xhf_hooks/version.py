__version__ = '0.1.0'


def package_versions() -> dict[str, str]:
    """What a manifest says about the packages at work."""
    from importlib.metadata import version

    return {'xhf_hooks': __version__, **{name: version(name) for name in ('torch', 'transformers')}}
