"""Redacts secrets in text: environment variables with telltale names, tokens of well-known
services, private keys, webhooks, signatures and passwords in URLs, headers with authorisation or
cookies, and values after words such as `password=`."""

from __future__ import annotations

import functools
import json
import os
import re
from urllib.parse import quote

REDACTED = "[redacted]"
LEAST = 8
"""Minimum length of a secret; shorter values are ordinary words."""
SECRET_NAME = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIAL"
    r"|AUTHORIZATION|COOKIE|WEBHOOK|CONN(ECTION)?_?STR(ING)?|SIGNATURE|PRESIGNED"
    r"|(^|_)(PASS|SAS|DSN|JWT|CREDS?)(_|$)|_PAT$|_KEY$|_AUTH$|_PWD$|_SIG$)",
    re.IGNORECASE,
)
_NO_SECRETS = re.compile(r"true|false|none|null|auto|\d+|(/[\w.-]+)+/?", re.IGNORECASE)
"""Harmless values of variables that match SECRET_NAME, as in TOKENIZERS_PARALLELISM=false."""
_WORD = (
    r"(?:token|secret|password|passwd|passphrase|credentials?|connection[_-]?string"
    r"|(?:api|access|account|private)[_-]?key)"
)
_FORMS = [
    # GitHub, GitLab, Hugging Face, OpenAI and Anthropic, Slack, AWS, Google, npm, PyPI, W&B
    re.compile(r"\b(?:gh[pousr]_|github_pat_)\w{20,}"),
    re.compile(r"\bglpat-[\w-]{16,}"),
    re.compile(r"\bhf_[A-Za-z0-9]{20,}"),
    re.compile(r"\bsk-[\w-]{20,}"),
    re.compile(r"\bxox[abeoprs]-[\w-]{10,}"),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    re.compile(r"\bAIza[\w-]{35}"),
    re.compile(r"\b(?:npm_|pypi-)[\w-]{30,}"),
    # JSON web tokens (RFC 7519), private keys (RFC 7468)
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),
    re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[\w+/=\s]|\\[nr])*"
        r"(?:-----END [A-Z ]*PRIVATE KEY-----)?"
    ),
]
_WEBHOOK = re.compile(r"\bhttps?://(?=hooks\.|[^\s\"'<>]*webhooks?\b)[^\s\"'<>\\]+", re.IGNORECASE)
_HEADER = re.compile(
    r"(\b(?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?(?:basic|digest|negotiate|token)\s+"
    r"|\b(?:set-)?cookie[\"']?\s*[:=]\s*[\"']?)[^\r\n\"'\\]{6,}",
    re.IGNORECASE,
)
_BASIC = re.compile(r"(\bBasic\s+)(?=[a-z]*[A-Z0-9+/])[A-Za-z0-9+/]{10,}={0,2}(?!\w)")
"""Basic authorisation (RFC 7617)."""
_SHORT_WORD = re.compile(
    r"((?:\b|_)(?:pass|pwd|sig|signature|dsn|sas)(?:=[\"']?|[\"']\s*:\s*[\"'])"
    r"|[?&][\w-]*(?:signature|credential|key|code|auth)=|\s(?:-u|--user)[\s=][^\s:]+:)"
    r"[^\s\"',;&\\]{6,}",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@'\"\\]+@", re.IGNORECASE)
"""User name and password in a URL (RFC 3986)."""
_NO_STRING = (
    r"(?!(?:-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|-?Infinity|NaN|true|false|null)(?:[\s,}\]]|$)|[\[{])"
)
"""Excludes unquoted JSON values (RFC 8259): redacting them would make the JSON invalid."""
_AFTER_WORD = re.compile(
    rf"(\b[\w-]*{_WORD}[\"']?\s*[=:]\s*(?:[\"']|{_NO_STRING})"
    rf"|\bbearer\s+|--[\w-]*{_WORD}\s+)"
    r"(?!\d+\b)[^\s\"',;&\\]{6,}",
    re.IGNORECASE,
)


def secrets_of(environment: dict[str, str]) -> tuple[str, ...]:
    """Returns secret variables' values, also escaped for JSON and URLs, longest first."""
    values = {
        written
        for name, value in environment.items()
        if SECRET_NAME.search(name) and len(value) >= LEAST and not _NO_SECRETS.fullmatch(value)
        for written in (value, json.dumps(value)[1:-1], quote(value, safe=""))
    }
    return tuple(sorted(values, key=lambda value: (-len(value), value)))


def redacted(text: str, secrets: tuple[str, ...] | None = None) -> str:
    """Replaces secrets (default: the environment's), and escapes lone surrogates, which files
    reject."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) < LEAST:
        return text  # a fast path for short columns, the majority
    for secret in _cached(tuple(os.environ.items())) if secrets is None else secrets:
        text = text.replace(secret, REDACTED)
    for form in (*_FORMS, _WEBHOOK):
        text = form.sub(REDACTED, text)
    for after in (_HEADER, _BASIC, _SHORT_WORD):
        text = after.sub(rf"\1{REDACTED}", text)
    text = _IN_ADDRESS.sub(rf"\1{REDACTED}@", text)
    return _AFTER_WORD.sub(rf"\1{REDACTED}", text)


@functools.lru_cache(maxsize=1)
def _cached(environment: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    return secrets_of(dict(environment))
