"""Who may ask a dashboard for what: pure functions of headers."""

from __future__ import annotations

import pytest

from fedquilt.tools.operations import access_control
from fedquilt.tools.operations.access_control import AccessPolicy


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8080", "localhost:8080", "localhost", "[::1]:8080", "192.168.7.4:80", "10.0.0.1", "LOCALHOST:1"]
)
def test_addresses_and_localhost_are_ours(host: str) -> None:
    assert access_control.refusal_reason({"host": host}) is None


@pytest.mark.parametrize(
    "host", ["", "evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil:1", "dash"]
)
def test_other_names_are_not(host: str) -> None:
    assert "is not permitted" in (access_control.refusal_reason({"host": host}) or "")


def test_a_name_that_was_allowed_is_ours() -> None:
    assert access_control.refusal_reason({"host": "dash.site:443"}, ["dash.site"]) is None
    assert access_control.refusal_reason({"host": "x.dash.site"}, ["dash.site"]) is not None


@pytest.mark.parametrize(
    "more",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "null"},
        {"origin": ""},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_pages_of_other_sites_may_link_here_and_change_nothing(more: dict[str, str]) -> None:
    headers = {"host": "127.0.0.1:8080", "origin": "http://127.0.0.1:8080", **more}
    assert access_control.refusal_reason(headers) is None
    assert "another site" in (access_control.refusal_reason(headers, is_action=True) or "")


def test_who_wants_something_done_says_from_which_page() -> None:
    headers = {"host": "127.0.0.1:8080"}
    assert access_control.refusal_reason(headers, is_action=True) is not None
    assert access_control.refusal_reason({**headers, "origin": "http://127.0.0.1:8080"}, is_action=True) is None


def test_a_door_opens_for_its_token_and_its_cookie() -> None:
    door, other = AccessPolicy(port=1), AccessPolicy(port=1)
    assert door.token != other.token
    assert door.accepts_token(door.token)
    for wrong in (other.token, "", None, 1, door.token[:-1], "ü"):
        assert not door.accepts_token(wrong)
    cookie = door.make_session_cookie()
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert door.token not in cookie
    assert door.token not in door.proof
    headers = {"cookie": cookie.partition(";")[0]}
    assert door.has_session(headers)
    assert not other.has_session(headers)
    assert not door.has_session({"cookie": "fedquilt-dash-1=ü; ;=;"})
    assert not door.permits_action(headers)
    assert door.permits_action({**headers, access_control.PROOF_HEADER: door.proof})
    assert not door.permits_action({access_control.PROOF_HEADER: door.proof})
    assert not door.permits_action({**headers, access_control.PROOF_HEADER: "ü"})


def test_no_page_runs_a_script_that_is_not_ours() -> None:
    for headers in (access_control.HEADERS, access_control.REPORT_HEADERS):
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe-eval" not in policy
        assert "script-src 'unsafe-inline'" not in policy
    assert "unsafe" not in access_control.HEADERS["content-security-policy"]
    assert "script-src" not in access_control.REPORT_HEADERS["content-security-policy"]
