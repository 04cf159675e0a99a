"""Every failure of a broker is one sentence with the place and the mend."""

import socket
import ssl
from pathlib import Path

import pytest

from fedquilt.transport.mqtt.broker import Broker
from fedquilt.transport.mqtt.connection import (
    connection_lost_error,
    no_answer_error,
    not_mqtt_error,
    refusal_error,
    tls_error,
    unreachable_error,
)

PLAIN = Broker("host", 1883)
TLS = Broker("host", 8883, tls=True)
MUTUAL = Broker("host", 8883, tls=True, cert=Path("dev.crt"), key=Path("dev.key"))
USER = Broker("host", 1883, user="me", password_file=Path("secret"))


def out_of_date(code: int, message: str) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = code, message
    return error


@pytest.mark.parametrize(
    ("error", "says", "final"),
    [
        (unreachable_error(PLAIN, socket.gaierror(socket.EAI_NONAME, "")), "check the name in mqtt://host:1883", True),
        (unreachable_error(PLAIN, socket.gaierror(socket.EAI_AGAIN, "")), "or the DNS", False),
        (unreachable_error(PLAIN, ConnectionRefusedError()), "start the broker", False),
        (unreachable_error(PLAIN, TimeoutError()), "no answer from mqtt://host:1883", False),
        (unreachable_error(PLAIN, OSError(113, "No route to host")), "(No route to host): check the address", False),
        (unreachable_error(TLS, ConnectionResetError()), "use its TLS port", False),
        (unreachable_error(TLS, ssl.SSLError(1, "wrong version number")), "does not use TLS on this port", True),
        (unreachable_error(TLS, out_of_date(9, "certificate is not yet valid")), "valid): set the clock", False),
        (unreachable_error(TLS, out_of_date(10, "certificate has expired")), "renew the broker's certificate", False),
        (tls_error(TLS, "tlsv13 alert certificate required"), "set cert and key", True),
        (tls_error(MUTUAL, "tlsv1 alert unknown ca"), "refuses dev.crt (tlsv1 alert unknown ca)", True),
        (tls_error(MUTUAL, "sslv3 alert certificate expired"), "renew it: `fedquilt identity enrol`", True),
        (tls_error(MUTUAL, "sslv3 alert certificate revoked"), "to use this device again", True),
        (tls_error(TLS, "unexpected eof while reading"), "check that it is an MQTT broker's TLS port", False),
        (refusal_error(PLAIN, "id", 135, "Not authorized"), "a client without a user (Not authorized): write", True),
        (refusal_error(USER, "id", 134, "Bad"), "refuses user 'me' (Bad): check the user and the password in se", True),
        (refusal_error(USER, "id", 133, "Id not valid"), "refuses 'id' (Id not valid)", True),
        (refusal_error(USER, "id", 137, "Server busy"), "(Server busy): see the broker's log", False),
        (no_answer_error(PLAIN), "or try mqtts://", False),
        (no_answer_error(TLS), "the broker may require a certificate, so set cert and key", False),
        (no_answer_error(MUTUAL), "has expired or was revoked", False),
        (not_mqtt_error(PLAIN, "Protocol error"), "use the port of an MQTT broker", False),
        (connection_lost_error(PLAIN, "id", 141, "", False), "was silent for too long", False),
        (connection_lost_error(PLAIN, "id", 128, "", False), "no other client uses the id 'id'", False),
        (connection_lost_error(PLAIN, "id", 142, "Taken", False), "another client uses the id 'id' at mqtt", False),
        (connection_lost_error(PLAIN, "id", 128, "", True), "soon closes each connection, as if another client", False),
    ],
)
def test_a_failure_is_one_sentence_and_final_if_waiting_cannot_mend_it(error, says, final):
    assert says in str(error)
    assert "host" in str(error)
    assert error.is_permanent is final
    assert "\n" not in str(error)
