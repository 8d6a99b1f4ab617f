import socket
from contextlib import closing

PACKET = bytes(1000)


def test_a_packet_takes_its_time_and_what_fits_no_queue_is_lost(program):
    line = program.Line(bytes_per_second=10_000, seconds=0.15, loss=0.0)
    (sender, source), (target, receiver) = (
        socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)
    )
    receiver.setblocking(False)
    with closing(sender), closing(source), closing(target), closing(receiver):
        way = program.Direction(source.fileno(), target.fileno(), line)
        for _ in range(5):
            sender.send(PACKET)
            way.take(100.0)
        # each takes 0.1 s of the line, and more than 0.3 s of queue there is not
        assert [round(at, 6) for at, _ in way.under_way] == [100.25, 100.35, 100.45, 100.55]
        assert way.lost == 1
        way.give(100.3)
        assert receiver.recv(2000) == PACKET
        assert len(way.under_way) == 3


def test_a_line_may_lose_every_packet(program):
    sender, source = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with closing(sender), closing(source):
        way = program.Direction(source.fileno(), -1, program.Line(1e6, 0.1, loss=1.0))
        sender.send(PACKET)
        way.take(1.0)
    assert (way.lost, list(way.under_way)) == (1, [])
