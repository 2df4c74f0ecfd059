"""The pods of this process's namespace, through Kubernetes' API."""

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from mesh.addresses import with_port
from mesh.errors import ConfigError, EndpointRefused, EndpointUnavailable

# Where Kubernetes mounts the account in a pod that has a service account.
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
ANSWER_SECONDS = 10.0
# RFC 1123's names. Nothing else may become part of a URL to which the account's token is sent.
_NAME = re.compile(r"[a-z0-9](?:[-.a-z0-9]{0,251}[a-z0-9])?")
NO_SUCH_POD = 404


@dataclass(frozen=True)
class Cluster:
    """The API's address, and the account that calls it."""

    url: str
    # A folder with token, ca.crt and namespace. Kubernetes renews tokens there.
    account: Path

    @classmethod
    def around_this_pod(cls) -> "Cluster":
        """Raises ConfigError if this process does not run in a pod."""
        try:
            host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        except KeyError as error:
            raise ConfigError("pods.deletion_costs is for schedulers in Kubernetes, and this is no pod") from error
        return cls(f"https://{with_port(host, int(port))}", ACCOUNT)


class Pods:
    """`async with Pods(cluster) as pods`. Raises ConfigError if the service account's files are missing."""

    def __init__(self, cluster: Cluster) -> None:
        try:
            namespace = (cluster.account / "namespace").read_text(encoding="utf-8").strip()
            trusted = ssl.create_default_context(cafile=str(cluster.account / "ca.crt"))
        except OSError as error:
            raise ConfigError(f"{cluster.account} has no service account of Kubernetes: {error.strerror}") from error
        self._token = cluster.account / "token"
        # trust_env=False: the environment's web proxy does not know the cluster's own addresses.
        self._http = httpx.AsyncClient(
            base_url=f"{cluster.url}/api/v1/namespaces/{namespace}/pods/",
            verify=trusted,
            timeout=ANSWER_SECONDS,
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def annotate(self, name: str, annotations: Mapping[str, str]) -> None:
        """Set annotations of a pod. Raises EndpointUnavailable, or EndpointRefused with the API's status. The status is
        NO_SUCH_POD also for a name that no pod can have.
        """
        if _NAME.fullmatch(name) is None:
            raise EndpointRefused(f"no pod can have the name {name!r}", status=NO_SUCH_POD)
        try:
            response = await self._http.patch(
                name,
                json={"metadata": {"annotations": dict(annotations)}},
                headers={
                    "Authorization": f"Bearer {self._token.read_text(encoding='utf-8').strip()}",
                    "Content-Type": "application/merge-patch+json",
                },
            )
        except (httpx.HTTPError, OSError) as error:
            raise EndpointUnavailable(f"Kubernetes' API does not answer: {error}") from error
        if response.is_error:
            message = f"Kubernetes' API refuses to annotate pod {name!r}: {response.status_code} {response.text[:200]}"
            raise EndpointRefused(message, status=response.status_code)
