"""Whether the Hugging Face hub answers, so that a machine without network fails in seconds.

On their own, ``datasets`` and ``transformers`` retry a name that does not resolve for 24 seconds, and one
that never answers for minutes (datasets 5.2, transformers 5.23), before they look into their caches.
"""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager


def reachable(*, timeout_seconds: float = 5.0) -> bool:
    """Whether the hub's endpoint (``HF_ENDPOINT``) answers at all.

    False in offline mode (``HF_HUB_OFFLINE``). Goes through the environment's proxies, as Hugging Face's own
    client does.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")  # noqa: S310 (the user's own endpoint)
    try:
        urllib.request.urlopen(request, timeout=timeout_seconds).close()  # noqa: S310
    except urllib.error.HTTPError:
        return True  # an error page is an answer
    except urllib.error.URLError as error:
        # Certificates that only Hugging Face's client knows: something answers, let that client judge.
        return isinstance(error.reason, ssl.SSLError)
    except (OSError, ValueError):
        return False
    return True


def tokenizer_problem(name: str) -> tuple[str, bool]:
    """Why the hub's tokenizer ``name`` cannot be had here, and whether another machine may have it.

    Returns:
        Words, empty if it can be had; and whether it is only that nobody here can tell: a machine that checks
        configs may have no network where those that train do.
    """
    from huggingface_hub import repo_exists, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    try:
        if any(isinstance(try_to_load_from_cache(name, file), str) for file in files):
            return "", False
        if not reachable():
            why = "it is no folder, not in this machine's cache, and the Hugging Face hub cannot be reached"
            return why, "/" in name  # names without an owner are a few old ones
        return ("" if repo_exists(name) else "the Hugging Face hub has no such model"), False
    except HFValidationError:
        return "it is no folder, and no name that the Hugging Face hub could have", False
    except (HfHubHTTPError, OSError):
        return "", False  # the hub answers with something else: let the run ask again


@contextmanager
def offline_unless(online: bool) -> Iterator[None]:
    """Inside, if not ``online``, ``datasets`` and ``transformers`` read their caches and try no network."""
    import datasets
    from huggingface_hub import constants

    if online:
        yield
        return
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
