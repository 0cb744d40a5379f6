"""Repositories of the Hugging Face hub: listings, downloads, and errors that say what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors

from digenrl.config.reading import ConfigError, one_line
from digenrl.logs import without_hub_warnings

HOW_TO_LOG_IN = "log in with 'hf auth login', or set model.token=env:NAME"
UNAUTHORIZED = (401, 403)


class HubUnreachableError(ConfigError):
    """The hub did not answer, and the cache does not have the files."""


@dataclass(frozen=True, slots=True)
class HubRepository:
    """One revision of a repository. `token` is `env:NAME`; None is the token of `hf auth login`, if any."""

    id: str
    revision: str | None = None
    token: str | None = None

    def cached(self, name: str) -> Path | None:
        """A file in the local cache, or None; the hub is not asked."""
        found = huggingface_hub.try_to_load_from_cache(self.id, name, revision=self.revision)
        return Path(found) if isinstance(found, str) else None

    def fetch(self, name: str) -> Path | None:
        """Downloads one file; None if the repository does not have it."""
        if name not in self.listing():  # fails at once without a connection; a download would be retried for long
            return None
        with self._errors():
            return Path(huggingface_hub.hf_hub_download(self.id, name, **self._access()))

    def listing(self) -> dict[str, int]:
        """All files of the repository with their sizes in bytes."""
        with self._errors():
            access = self._access()
            info = huggingface_hub.HfApi(endpoint=access.pop("endpoint")).model_info(
                self.id, files_metadata=True, **access
            )
        return {file.rfilename: file.size or 0 for file in info.siblings or ()}

    def download(self, files: Sequence[str]) -> Path:
        """Downloads these files, unless the cache has them; returns the folder of the snapshot."""
        with self._errors():
            return Path(huggingface_hub.snapshot_download(self.id, allow_patterns=list(files), **self._access()))

    def check_token(self) -> None:
        """Raises ConfigError if the environment variable with the token is not set."""
        if self.token is not None and not os.environ.get(self._token_variable):
            raise ConfigError(
                f"model.token: {self.token}, but the environment variable {self._token_variable} is not set; set "
                "it, or leave model.token out and log in with: hf auth login"
            )

    @property
    def _token_variable(self) -> str:
        return (self.token or "").removeprefix("env:")

    def _access(self) -> dict[str, Any]:
        self.check_token()
        token = None if self.token is None else os.environ[self._token_variable]
        return {"revision": self.revision, "token": token, "endpoint": _endpoint()}

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns every error of the hub into a ConfigError; warnings about retries are not shown."""
        try:
            with without_hub_warnings():
                yield
        except ConfigError:
            raise
        except Exception as error:  # errors of the HTTP library have no base class in common with the hub's
            raise self._explained(error) from None

    def _explained(self, error: Exception) -> ConfigError:
        if isinstance(error, errors.GatedRepoError):
            page = f"{_endpoint()}/{self.id}"
            return ConfigError(f"{self.id}: gated: accept its license at {page}, then {HOW_TO_LOG_IN}")
        if isinstance(error, errors.RepositoryNotFoundError):
            return ConfigError(
                f"{self.id}: no such directory, and no such repository on the hub, or a private one; check the "
                f"name, or {HOW_TO_LOG_IN}"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return ConfigError(f"{self.id}: has no revision '{self.revision}'{self._known_revisions()}")
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in UNAUTHORIZED:
            return ConfigError(f"{self.id}: the hub refuses access ({status}); {HOW_TO_LOG_IN}")
        if status is not None:
            return HubUnreachableError(f"{self.id}: the hub answers with an error ({one_line(error)}); try again")
        cause = error.__cause__ or error
        return HubUnreachableError(
            f"{self.id}: no such directory, not in the cache, and the hub cannot be reached; check the connection "
            f"(and HF_HUB_OFFLINE), or give a folder as model.source ({type(cause).__name__}: {one_line(cause)})"
        )

    def _known_revisions(self) -> str:
        with suppress(Exception):
            access = self._access()
            refs = huggingface_hub.HfApi(endpoint=access["endpoint"]).list_repo_refs(
                self.id, token=access["token"]
            )
            return f"; known: {', '.join(ref.name for ref in [*refs.branches, *refs.tags])}"
        return ""


def _endpoint() -> str:
    """The hub's address; huggingface_hub reads the variable only when it is imported."""
    return os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")
