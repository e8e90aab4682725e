"""Take secrets out of log text before anything is returned, printed or written.

Every SGLang release prints its arguments with the key in clear, and tracebacks quote requests and URLs, so the
rules go by the shape of the argument, not by the place where it is printed.
"""

# ruff: noqa: E501  (patterns and table rows are read in one piece)
from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

MASK = "[redacted]"

# A name that holds a secret. `token` alone counts, `mask_token`, `max_total_tokens` and `tokenizer` do not.
_NAME = (
    r"(?:[a-z0-9]+[_-])*(?:api[_-]?key|apikey|secret[_-]?key|access[_-]?key|private[_-]?key)s?"
    r"|(?:[a-z0-9]+[_-])*(?:password|passwd|passphrase|client[_-]secret|secret)"
    r"|(?:[a-z0-9]+[_-])*(?:hf|hub|hugging[_-]?face(?:[_-]hub)?|access|auth|bearer|api|github|refresh|session)[_-]token"
    r"|token"
)
_QUOTED = r"(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"

# api_key='x', 'api_key': 'x', "api_key": "x", api_key=x, --api-key=x; None, null and booleans are kept: they say "not set".
_ASSIGNED = re.compile(
    r"(?i)(?<![\w-])(?P<head>(?:--)?['\"]?(?:" + _NAME + r")['\"]?\s*[=:]\s*)"
    r"(?P<value>" + _QUOTED + r"|[^\s,;)}\]'\"&]+)"
)
# --api-key x, '--api-key', 'x'
_OPTION = re.compile(
    r"(?i)(?P<head>(?<![\w-])--(?:" + _NAME + r")['\"]?,?\s+)(?P<value>" + _QUOTED + r"|[^\s,;)}\]'\"-][^\s,;)}\]'\"]*)"
)
# Environment in the usual capitals: HF_TOKEN=x, FOO_API_KEY=x, AWS_SECRET_ACCESS_KEY=x
_ENVIRONMENT = re.compile(
    r"(?P<head>\b[A-Z][A-Z0-9_]*(?:TOKEN|KEY|SECRET|PASSWORD)['\"]?\s*[=:]\s*)(?P<value>"
    + _QUOTED
    + r"|[^\s,;)}\]'\"]+)"
)
_BEARER = re.compile(r"(?i)(?P<head>\bbearer\s+)(?P<value>[A-Za-z0-9._~+/=-]{4,})")
_BASIC = re.compile(r"(?i)(?P<head>\bauthorization['\"]?\s*[:=]\s*['\"]?basic\s+)(?P<value>[A-Za-z0-9+/=]{4,})")
_KNOWN_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{8,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_[A-Za-z0-9_]{16,}"
    r"|\bnvapi-[A-Za-z0-9_-]{16,}|\bAKIA[A-Z0-9]{16}\b"
)
_URL_USER = re.compile(r"(?P<head>\b[a-z][a-z0-9+.-]{1,15}://[^\s/@:'\"]{0,128}:)(?P<value>[^\s/@'\"]{1,256})(?=@)")
_URL_QUERY = re.compile(
    r"(?i)(?P<head>[?&](?:x-amz-signature|x-amz-credential|x-amz-security-token|signature|sig|key-pair-id|policy|token|access_token"
    r"|api_key)=)(?P<value>[^&\s'\"]+)"
)

_KEPT_VALUES = re.compile(
    r"(?i)^['\"]?(?:none|null|true|false|\d{1,5}(?:\.\d+)?|" + re.escape(MASK) + r"|\*+|<[^>]*>)?['\"]?$"
)
# Nothing to do for most lines: one cheap look first.
_HINT = re.compile(
    r"(?i)key|token|secret|passw|passphrase|bearer|basic|hf_|sk-|gh[pousr]_|github_pat|nvapi|AKIA|://|sig|policy"
)


def _mask(match: re.Match[str]) -> str:
    value = match.group("value")
    if _KEPT_VALUES.match(value) or value.startswith(MASK[:-1]):
        return match.group(0)
    quote = value[0] if value[:1] in "'\"" else ""
    return f"{match.group('head')}{quote}{MASK}{quote}"


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Return the text without keys, tokens and passwords; `secrets` are values known to the caller."""
    for secret in secrets:
        if secret and len(secret) >= 4:
            text = text.replace(secret, MASK)
    if not _HINT.search(text):
        return text
    text = _KNOWN_SHAPES.sub(MASK, text)
    for pattern in (_URL_USER, _URL_QUERY, _BEARER, _BASIC, _OPTION, _ASSIGNED, _ENVIRONMENT):
        text = pattern.sub(_mask, text)
    return text


def redact_all(value: Any, secrets: Iterable[str] = ()) -> Any:
    """Redact every string inside a structure of dicts and lists; keys are kept as they are."""
    known = tuple(secrets)
    if isinstance(value, str):
        return redact(value, known)
    if isinstance(value, dict):
        return {key: redact_all(item, known) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_all(item, known) for item in value]
    return value
