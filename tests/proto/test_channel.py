import os
import sys

import pytest

from staddle.errors import LocalError
from staddle.proto import channel


@pytest.mark.parametrize(
    ("size", "seconds"),
    [(0, 60.0), (32 * 1024, 61.0), (16 * 1024, 60.5), (1024**3, 60.0 + 32768.0)],
)
def test_a_transfer_has_its_grace_and_the_slowest_rate(size, seconds):
    assert channel.transfer_seconds(size) == seconds


def test_more_bytes_have_more_time():
    seconds = channel.transfer_seconds
    assert seconds(2**40) > seconds(2**30) > seconds(0) > 0


def test_tls_1_2_loses_every_cipher_suite_that_members_could_use(monkeypatch):
    monkeypatch.delitem(sys.modules, "grpc", raising=False)
    monkeypatch.setenv("GRPC_SSL_CIPHER_SUITES", "HIGH")
    channel.require_tls13()
    assert os.environ["GRPC_SSL_CIPHER_SUITES"] == channel.TLS13_ONLY
    assert "PSK" in channel.TLS13_ONLY
    assert ":" not in channel.TLS13_ONLY


def test_tls_1_3_is_refused_too_late_and_allowed_twice(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc", object())
    monkeypatch.setenv("GRPC_SSL_CIPHER_SUITES", channel.TLS13_ONLY)
    channel.require_tls13()
    monkeypatch.delenv("GRPC_SSL_CIPHER_SUITES")
    with pytest.raises(LocalError, match="before GRPC_SSL_CIPHER_SUITES was set"):
        channel.require_tls13()
    assert "GRPC_SSL_CIPHER_SUITES" not in os.environ


@pytest.mark.parametrize(("given", "left"), [(None, "NONE"), ("DEBUG", "DEBUG")])
def test_grpc_is_silent_unless_somebody_asks(monkeypatch, given, left):
    monkeypatch.setenv("GRPC_VERBOSITY", "of another test")
    monkeypatch.delenv("GRPC_VERBOSITY")
    if given:
        monkeypatch.setenv("GRPC_VERBOSITY", given)
    channel.require_tls13()
    assert os.environ["GRPC_VERBOSITY"] == left


def test_both_ends_hold_the_same_limits():
    assert set(channel.OPTIONS) <= set(channel.SERVER_OPTIONS)
    assert len(dict(channel.SERVER_OPTIONS)) == len(channel.SERVER_OPTIONS)
    both = dict(channel.OPTIONS)
    lengths = {both[f"grpc.max_{way}_message_length"] for way in ("receive", "send")}
    assert lengths == {channel.MAX_MESSAGE_BYTES}
    assert both["grpc.enable_http_proxy"] == 0
    assert both["grpc.compression_enabled_algorithms_bitset"] == 1


def test_the_server_lets_the_clients_pings_pass():
    server, both = dict(channel.SERVER_OPTIONS), dict(channel.OPTIONS)
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < both["grpc.keepalive_time_ms"]


def test_both_ends_notice_within_a_minute_that_the_other_vanished():
    for options in (dict(channel.OPTIONS), dict(channel.SERVER_OPTIONS)):
        assert options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"] <= 60_000
        assert options["grpc.keepalive_permit_without_calls"] == 1  # between two calls too
        assert options["grpc.http2.max_pings_without_data"] == 0  # however long nothing is said


def test_a_ping_is_awaited_for_as_long_as_the_bytes_before_it_take():
    seconds = channel.WINDOW_BYTES / channel.SLOWEST_BYTES_PER_SECOND
    assert dict(channel.OPTIONS)["grpc.http2.ping_timeout_ms"] > 1000 * seconds


def test_a_chunk_fits_into_a_frame_with_room_for_its_header():
    assert channel.CHUNK_BYTES + 1024 <= channel.MAX_MESSAGE_BYTES
    assert channel.PROTOCOL_MIN <= channel.PROTOCOL_MAX
