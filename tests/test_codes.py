"""Channel numbers in bits."""

import numpy as np
import pytest

from stamppruner import codes


@pytest.mark.parametrize("width", [1, 2, 3, 8, 31, 100])
def test_every_channel_is_read_back(width):
    answers = np.array(list(codes.spelling(width)))
    assert len(answers) == 2 * codes.bits_for(width)
    channel, sure = codes.decode(answers)
    assert channel.tolist() == list(range(width))
    assert sure.all()


def test_two_channels_at_a_place_are_not_sure_and_both_allowed():
    answers = np.array(list(codes.spelling(8)))
    both = (answers[:, [1]] | answers[:, [3]])[:, [0]]
    assert not codes.decode(both)[1].any()
    assert set(codes.allowed(both, 8)[0].tolist()) == {1, 3}


@pytest.mark.parametrize("width", [3, 6, 8, 100])
def test_no_two_channels_differ_in_every_bit_of_both_codes(width):
    both = np.array([*codes.spelling(width), *codes.reflected(width)])
    pairs = both[:, :, None] | both[:, None, :]
    assert not pairs.all(axis=0).any()


def test_nothing_at_a_place_is_not_sure():
    assert not codes.decode(np.zeros((6, 1), dtype=bool))[1].any()
