"""Pipeline schedules as data: who computes and sends what, in which order.

generators, zero_bubble    schedules by name
transfers                  the sends and receives of a schedule of computation
validate                   whether a schedule is right
simulate                   how long it takes, and where ranks idle
render                     its picture and its trace
"""

from accel.parallel.schedule.actions import Action, Kind, Message, Placement, Schedule, in_flight
from accel.parallel.schedule.engine import Deadlock, Event, Times
from accel.parallel.schedule.generators import dualpipe_v, forward_only, interleaved, one_f_one_b
from accel.parallel.schedule.render import to_chrome_trace, to_png, to_svg
from accel.parallel.schedule.simulate import Timeline, simulate
from accel.parallel.schedule.transfers import with_transfers
from accel.parallel.schedule.validate import validate
from accel.parallel.schedule.zero_bubble import v_half, v_min, zb_h1, zb_v

__all__ = [
    "Action",
    "Deadlock",
    "Event",
    "Kind",
    "Message",
    "Placement",
    "Schedule",
    "Timeline",
    "Times",
    "dualpipe_v",
    "forward_only",
    "in_flight",
    "interleaved",
    "one_f_one_b",
    "simulate",
    "to_chrome_trace",
    "to_png",
    "to_svg",
    "v_half",
    "v_min",
    "validate",
    "with_transfers",
    "zb_h1",
    "zb_v",
]
