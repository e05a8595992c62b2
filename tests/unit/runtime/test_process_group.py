"""Where ranks meet."""

from __future__ import annotations

import sys

import pytest

from tandem.runtime.process_group import interface_of, open_meeting


def test_two_meetings_on_one_machine_do_not_meet() -> None:
    first, second = open_meeting("127.0.0.1", 2), open_meeting("127.0.0.1", 2)
    assert first.port != second.port
    first.set("x", "1")
    second.set("x", "2")
    assert first.get("x") == b"1"


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None  # an address for documentation: RFC 5737
