"""What to install where Ray is not."""

from __future__ import annotations


def explained(error: ImportError) -> ImportError:
    """Turn an error of importing Ray into an error that says what to install."""
    what = error.name or "ray"
    return type(error)(f"paged.ray needs {what}, which is not installed: pip install 'paged[ray]'", name=what)
