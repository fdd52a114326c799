"""What stands in a batch: the records' rows, nothing else, in both layouts."""

import numpy as np
import pytest

ROWS = [
    {"tokens": [[1, 2, 3], [4]], "advantages": [[0.5, 1, 1.5], [2]], "score": [1.0, 0.0], "step_rewards": [[0.5], []]},
    {"tokens": [[5, 6]], "score": [0.5], "instance_id": ["x"], "reward_components": [{"a": 1.0}]},
    {"tokens": [[7], [8, 9], []], "loss_mask": [[1], [0, 1], []], "group_overrides": {"k": 1}, "scores": [1, 2, 3]},
]


@pytest.fixture
def batch(producer, consumer):
    def make(groups=ROWS, **options):
        for number, group in enumerate(groups):
            producer.put(group, group_id=f"g{number}", policy_version=number)
        return next(consumer.batches(groups=len(groups), **{"prefetch": 0, **options}))

    return make


def test_packed_arrays_are_the_rows_one_after_another(batch) -> None:
    it = batch()
    assert it.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert it.cu_seqlens.tolist() == [0, 3, 4, 6, 7, 9, 9]
    assert it.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 0, 0, 1]
    assert it.lengths.tolist() == [3, 1, 2, 1, 2, 0]
    assert it.group_index.tolist() == [0, 0, 1, 2, 2, 2]
    assert (len(it), it.token_count, it.group_count) == (6, 9, 3)
    assert (it.tokens.dtype, it.cu_seqlens.dtype, it.position_ids.dtype) == (np.int32,) * 3


def test_padded_arrays_have_zeros_on_the_right(batch) -> None:
    it = batch(layout="padded")
    assert it.tokens.tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0], [7, 0, 0], [8, 9, 0], [0, 0, 0]]
    assert it.advantages.tolist() == [[0.5, 1.0, 1.5], [2.0, 0, 0], *[[0.0] * 3] * 4]
    assert it.position_ids.shape == it.tokens.shape


def test_a_column_some_records_lack_is_zero_there_and_says_so(batch) -> None:
    it = batch()
    assert it.advantages.tolist() == [0.5, 1.0, 1.5, 2.0, 0, 0, 0, 0, 0]
    assert it.has("advantages").tolist() == [True, True, False, False, False, False]
    assert it.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 1]
    assert it.has("loss_mask").tolist() == [False, False, False, True, True, True]
    assert it.has("scores").all()


def test_a_column_no_record_has_is_none_or_a_key_error(batch) -> None:
    it = batch()
    assert it.ref_logprobs is None
    assert "ref_logprobs" not in it
    assert not it.has("ref_logprobs").any()
    with pytest.raises(KeyError):
        it["ref_logprobs"]
    with pytest.raises(AttributeError):
        _ = it.no_such_column


def test_scalars_lists_texts_and_maps_have_one_entry_per_row(batch) -> None:
    it = batch()
    assert it.scores.tolist() == it.score.tolist() == it["scores"].tolist() == [1.0, 0.0, 0.5, 1.0, 2.0, 3.0]
    assert [row.tolist() for row in it.step_rewards] == [[0.5], [], [], [], [], []]
    assert it.instance_id == [None, None, "x", None, None, None]
    assert it.reward_components == [None, None, {"a": 1.0}, None, None, None]
    assert it.group_overrides == [None, None, None, '{"k":1}', '{"k":1}', '{"k":1}']


def test_metadata_is_per_row(batch) -> None:
    it = batch()
    assert [meta.group_id for meta in it.meta] == ["g0", "g0", "g1", "g2", "g2", "g2"]
    assert [meta.min_policy_version for meta in it.meta] == [0, 0, 1, 2, 2, 2]


def test_the_arrays_stay_after_release(batch, producer) -> None:
    it = batch()
    assert producer.stats()["held"] == 3
    it.release()
    it.release()
    assert producer.stats()["held"] == 0
    for number in range(50):
        producer.put({"tokens": [[number] * 20]})
    assert it.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_uneven_rows_are_cut_or_filled_to_their_tokens(producer, consumer) -> None:
    producer.put({"tokens": [[1, 2, 3], [4]], "masks": [[1], [4, 5, 6]], "scores": [1.0]}, foreign=True)
    it = next(consumer.batches(groups=1, prefetch=0))
    assert it.masks.tolist() == [1, 0, 0, 4]
    assert it.scores.tolist() == [1.0, 0.0]


def test_random_groups_equal_their_records(producer, consumer) -> None:
    draw = np.random.default_rng(3)
    for layout in ("packed", "padded"):
        groups = []
        for _ in range(12):
            lengths = draw.integers(0, 40, draw.integers(1, 5))
            group = {"tokens": [draw.integers(0, 1000, n) for n in lengths], "score": draw.normal(size=len(lengths))}
            if draw.random() < 0.5:
                group["inference_logprobs"] = [draw.normal(size=n).astype(np.float32) for n in lengths]
            groups.append(group)
            producer.put(group)
        it = next(consumer.batches(groups=12, layout=layout, prefetch=0))
        row = 0
        for group in groups:
            for place, tokens in enumerate(group["tokens"]):
                where = (row, slice(len(tokens))) if layout == "padded" else slice(*it.cu_seqlens[row : row + 2])
                assert it.tokens[where].tolist() == tokens.tolist()
                expected = group["inference_logprobs"][place] if "inference_logprobs" in group else np.zeros(len(tokens))
                assert it.inference_logprobs[where].tolist() == expected.tolist()
                assert it.scores[row] == group["score"][place]
                row += 1
        it.release()
