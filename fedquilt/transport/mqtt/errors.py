"""Errors of a broker connection, each a sentence with a fix. No I/O."""

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING, Final

from fedquilt.core import LinkError

if TYPE_CHECKING:
    from fedquilt.transport.mqtt.broker import Broker

# reason codes of MQTT 5, to which paho translates those of 3.1.1
UNSPECIFIED: Final = 128  # also: no reason was given
PROTOCOL_ERROR: Final = 130
UNSUPPORTED_VERSION: Final = 132
KEEP_ALIVE: Final = 141
SESSION_TAKEN_OVER: Final = 142
TOO_LARGE: Final = 149
NOT_AUTHORIZED: Final = 135
_CREDENTIALS: Final = frozenset({134, NOT_AUTHORIZED})
_TRANSIENT: Final = frozenset({136, 137, 151, 159})  # unavailable, busy, quota, rate
OUT_OF_DATE: Final = frozenset({9, 10})  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_REFUSED: Final = {
    "certificate expired": "renew it: `fedquilt identity enrol` on a board, `fedquilt identity issue` for the "
    "coordinator",
    "certificate revoked": "it was revoked on purpose; if this side is to come back, remove its key and certificate, "
    "and enrol it with a new token",
}
_OWN_ID: Final = "give each agent its own `device`, and each fleet one coordinator"
_OTHER_NAME: Final = frozenset({62, 64})  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH


class ConnectionFailedError(LinkError):
    """Failed connection. `final` is true if retries are useless before the cause is fixed."""

    def __init__(self, sentence: str, final: bool = False) -> None:
        super().__init__(sentence)
        self.final = final


def describe_exception(error: Exception) -> str:
    if reason := getattr(error, "reason", None):  # from OpenSSL
        return str(reason).lower().replace("_", " ")
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def unreachable_error(broker: Broker, error: Exception) -> ConnectionFailedError:
    if isinstance(error, (socket.gaierror, UnicodeError)):
        final = getattr(error, "errno", None) == socket.EAI_NONAME
        return ConnectionFailedError(
            f"no address is known for {broker.host!r}: check the name in {broker}, or the DNS", final
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _OTHER_NAME:
            return ConnectionFailedError(
                f"the certificate of {broker} is for another name: use the name it was made for", True
            )
        if error.verify_code in OUT_OF_DATE:
            said = f"the certificate of {broker} is out of date by this machine's clock ({error.verify_message})"
            return ConnectionFailedError(f"{said}: set the clock, or renew the broker's certificate")
        given = f"{broker.ca} did not sign it" if broker.ca else "no authority of this system signed it"
        reason = f"the certificate of {broker} is not to be trusted ({error.verify_message}): {given}"
        return ConnectionFailedError(f"{reason}; give the CA file that did", True)
    if isinstance(error, ssl.SSLError):
        return tls_error(broker, describe_exception(error))
    if isinstance(error, ConnectionRefusedError):
        return ConnectionFailedError(
            f"nothing listens at {broker} (connection refused): start the broker or correct the URL"
        )
    if broker.tls and isinstance(error, (ConnectionResetError, BrokenPipeError)):
        return ConnectionFailedError(
            f"{broker} hung up at the TLS handshake: use its TLS port (mostly 8883), or mqtt://"
        )
    if isinstance(error, TimeoutError):
        return ConnectionFailedError(f"no answer from {broker}: check the address, the network and the firewall")
    return ConnectionFailedError(
        f"{broker} cannot be reached ({describe_exception(error)}): check the address, the network and the broker"
    )


def tls_error(broker: Broker, said: str) -> ConnectionFailedError:
    """Return the error for a TLS failure, from the text of OpenSSL.

    TLS 1.3 checks the client's certificate only after the handshake, by an alert.
    """
    if "wrong version number" in said or "record layer failure" in said:
        return ConnectionFailedError(
            f"{broker} does not speak TLS there: use its TLS port (mostly 8883), or mqtt://", True
        )
    if "alert" not in said:
        return ConnectionFailedError(f"TLS with {broker} failed ({said}): check that it is an MQTT broker's TLS port")
    if broker.cert is None:
        return ConnectionFailedError(f"{broker} requires a certificate of ours ({said}): give cert and key", True)
    mend = next((mend for word, mend in _REFUSED.items() if word in said), "have one signed by the broker's CA")
    return ConnectionFailedError(f"{broker} refuses {broker.cert} ({said}): {mend}", True)


def refusal_error(broker: Broker, client_id: str, code: int, reason: str) -> ConnectionFailedError:
    if code not in _CREDENTIALS:
        return ConnectionFailedError(
            f"{broker} refuses {client_id!r} ({reason}): see the broker's log", code not in _TRANSIENT
        )
    if broker.user is None:
        mend = "write mqtt[s]://USER@host and give a password file, or give a certificate it knows"
        return ConnectionFailedError(f"{broker} refuses a client without a user ({reason}): {mend}", True)
    mend = f"the password in {broker.password_file}" if broker.password_file else "give a password file"
    return ConnectionFailedError(f"{broker} refuses user {broker.user!r} ({reason}): check the user and {mend}", True)


def attempt_error(broker: Broker, client_id: str, code: int, reason: str, said: str) -> ConnectionFailedError | None:
    """Return the error of a failed attempt, or None if there was no CONNACK code or TLS alert.

    Args:
        broker: The broker of the attempt.
        client_id: The client id of this side.
        code: The code of CONNACK, as in MQTT 5.
        reason: The text of the code.
        said: The last error message of paho.
    """
    if code == PROTOCOL_ERROR:
        return not_mqtt_error(broker, reason)
    if code > UNSPECIFIED and code != KEEP_ALIVE:
        return refusal_error(broker, client_id, code, reason)
    if "[SSL" in said:
        return tls_error(broker, said.rpartition("] ")[2].partition(" (_ssl")[0])
    return None


def no_answer_error(broker: Broker) -> ConnectionFailedError:
    if not broker.tls:
        mend = "is it an MQTT port, and is mqtts:// needed?"
    elif broker.cert is None:
        mend = "it may want a certificate: give cert and key"
    else:
        mend = f"it may want another certificate than ours, if {broker.cert} has expired or was revoked"
    return ConnectionFailedError(f"{broker} hung up without an answer: {mend}")


def not_mqtt_error(broker: Broker, said: str) -> ConnectionFailedError:
    return ConnectionFailedError(f"{broker} sent what is not MQTT ({said}): check that it is an MQTT broker's port")


def connection_lost_error(broker: Broker, client_id: str, code: int, reason: str, again: bool) -> ConnectionFailedError:
    """Return the error for a lost connection. With `again`, earlier ones were lost soon after their start too."""
    if code == KEEP_ALIVE:
        return ConnectionFailedError(f"no sign of life from {broker}: check the network")
    if code == SESSION_TAKEN_OVER:
        return ConnectionFailedError(f"another client uses the id {client_id!r} at {broker}: {_OWN_ID}")
    said = f" ({reason})" if code > UNSPECIFIED else ""
    if again:  # Mosquitto 2.0 and MQTT 3.1.1 state no reason
        does = f"soon closes each connection{said}, as if another client used the id {client_id!r}"
        return ConnectionFailedError(f"{broker} {does}: {_OWN_ID}, or see the broker's log")
    mend = f"check that it still runs, and that no other client uses the id {client_id!r}"
    return ConnectionFailedError(f"{broker} closed the connection{said}: {mend}")


def unread_error(broker: Broker) -> ConnectionFailedError:
    return ConnectionFailedError(f"{broker} reads nothing any more: check the network, and the broker's load")


def describe_refused_message(broker: Broker, topic: str, code: int, reason: str) -> str:
    mine = "its certificate or user may have no right there: see the broker's ACL"
    mend = mine if code == NOT_AUTHORIZED else "see the broker's log"
    return f"{broker} refuses messages to {topic} ({reason}): {mend}"


def describe_oversized_message(broker: Broker, topic: str, size: int) -> str:
    return f"{broker} takes no message of {size} bytes to {topic}: it was dropped; raise the broker's packet limit"
