"""The generator on its own: order, groups that do not fit, what is carried, what waits, what comes back."""

import asyncio
import contextlib
import threading

import numpy as np
import pytest

import shmbridge
from shmbridge.testing import wait_until


def group(rows=4, first=10, size=6, **columns):
    """Rows of `size` tokens, two of them the prompt; token values tell rows and places apart."""
    tokens = [np.arange(size, dtype=np.int32) + first * (row + 1) for row in range(rows)]
    return {
        "tokens": tokens,
        "prompt_length": [2] * rows,
        "loss_mask": [np.array([0, 0] + [1] * (size - 2), np.uint8)] * rows,
        "advantages": [
            np.where(np.arange(size) < 2, 0, row + np.arange(size) / 8).astype(np.float32)
            for row in range(rows)
        ],
        "inference_logprobs": [np.full(size, -0.5, np.float32)] * rows,
        "score": [float(row) for row in range(rows)],
    } | columns  # fmt: skip


async def generated(generator, given):
    """What SkyRL gets, checked by SkyRL's own rules."""
    from skyrl.train.utils.trainer_utils import validate_generator_output

    output = await generator.generate(given)
    validate_generator_output(len(given["prompts"]), output, step_wise=generator.step_wise)
    return output


async def test_rows_come_in_the_order_of_the_input(make_generator, producer, prompts):
    for number in range(3):
        producer.put(group(first=100 * (number + 1)), group_id=f"g{number}")
    given = prompts(3, 4)
    output = await generated(make_generator(), given)
    assert output["trajectory_ids"] == given["trajectory_ids"]
    assert [row["group_id"] for row in output["env_metrics"]] == ["g0"] * 4 + ["g1"] * 4 + ["g2"] * 4
    assert output["prompt_token_ids"][5] == [400, 401]
    assert output["response_ids"][5] == [402, 403, 404, 405]
    assert output["rewards"][5] == [1.25, 1.375, 1.5, 1.625]
    assert output["rollout_logprobs"][5] == [-0.5] * 4
    assert output["stop_reasons"][5] == "unknown"


async def test_repetitions_are_put_in_order(make_generator, producer, prompts):
    producer.put(group(repetition_id=[2, 0, 3, 1], finish_reason=[1, 0, 0, 0]))
    output = await generated(make_generator(), prompts(1, 4))
    assert [tokens[0] for tokens in output["prompt_token_ids"]] == [20, 40, 10, 30]
    assert output["stop_reasons"] == ["stop", "stop", "length", "stop"]


async def test_a_short_group_is_padded_by_rows_that_train_nothing(make_generator, producer, prompts):
    producer.put(group(rows=3))
    generator = make_generator()
    output = await generated(generator, prompts(1, 4))
    assert output["loss_masks"][3] == [0]
    assert output["rewards"][3] == [0.0]
    assert output["env_metrics"][3]["masked"]
    assert output["rollout_metrics"]["shmbridge/rows_masked"] == 1
    assert generator.stats()["rows_masked"] == 1


async def test_a_long_group_is_refused_and_stays(make_generator, producer, prompts):
    from shmbridge.consumers.skyrl.generator import GroupDoesNotFit

    producer.put(group(rows=5), group_id="long")
    generator = make_generator()
    with pytest.raises(
        GroupDoesNotFit, match=r"group long .* has 5 .* n_samples_per_prompt is 4 -> .*prompt=5"
    ):
        await generated(generator, prompts(1, 4))
    assert generator.held == 0
    again = await generator.feed.take_async(5.0)
    assert again.groups[0].group_id == "long"


async def test_a_long_group_is_trimmed_and_counted(make_generator, producer, prompts):
    producer.put(group(rows=6))
    output = await generated(make_generator(long_groups="trim"), prompts(1, 4))
    assert output["rollout_metrics"]["shmbridge/rows_trimmed"] == 2
    assert [tokens[0] for tokens in output["prompt_token_ids"]] == [10, 20, 30, 40]


async def test_steps_of_an_episode_are_rows_with_an_end(make_generator, producer, prompts):
    columns = {"repetition_id": [1, 0, 0, 1, 1], "row_index": [2, 1, 0, 0, 1]}
    producer.put(group(rows=5, is_last=[True, True, False, False, False], **columns))
    output = await generated(make_generator(3, step_wise=True), prompts(1, 3))
    assert [each.repetition_id for each in output["trajectory_ids"]] == [0, 0, 1, 1, 1, 2]
    assert output["is_last_step"] == [False, True, False, False, True, True]
    assert [tokens[0] for tokens in output["prompt_token_ids"]] == [30, 20, 40, 50, 10, 10]
    assert output["loss_masks"][5] == [0]


async def test_episodes_without_numbers_end_where_they_say(make_generator, producer, prompts):
    producer.put(group(rows=3, is_last=[False, True, True]))
    output = await generated(make_generator(2, step_wise=True), prompts(1, 2))
    assert output["is_last_step"] == [False, True, True]
    assert [each.repetition_id for each in output["trajectory_ids"]] == [0, 0, 1]


async def test_an_episode_of_several_rows_needs_the_step_wise_mode(make_generator, producer, prompts):
    from shmbridge.consumers.skyrl.generator import GroupDoesNotFit

    producer.put(group(rows=3, is_last=[False, True, True]))
    with pytest.raises(GroupDoesNotFit, match=r"episode of 2 rows .*step_wise_trajectories=true"):
        await generated(make_generator(), prompts(1, 4))


async def test_instances_find_their_prompts_in_any_order(make_generator, producer, prompts):
    for instance in ("2", "7", "0", "1"):
        producer.put(group(instance_id=[instance] * 4), group_id=f"of-{instance}")
    generator = make_generator(match="instance")
    output = await generated(generator, prompts(3, 4))
    assert [row["instance_id"] for row in output["env_metrics"]] == ["0"] * 4 + ["1"] * 4 + ["2"] * 4
    assert generator.stats()["early_groups"] == 1
    late = await generated(generator, prompts(1, 4, first=7))
    assert late["env_metrics"][0]["group_id"] == "of-7"
    assert generator.held == generator.feed.stats()["feed_steps_out"] == 4


async def test_calls_at_once_find_their_instances(make_generator, producer, prompts):
    generator = make_generator(match="instance")
    calls = [asyncio.create_task(generated(generator, prompts(1, 4, first=each))) for each in range(3)]
    await asyncio.sleep(0)
    for instance in (2, 0, 1):
        producer.put(group(instance_id=[str(instance)] * 4))
    for number, output in enumerate(await asyncio.gather(*calls)):
        assert output["env_metrics"][0]["instance_id"] == str(number)


async def test_instances_that_nobody_asks_for_are_an_error(make_generator, producer, prompts):
    from shmbridge.consumers.skyrl.generator import NobodyAsks

    for instance in ("5", "6", "7"):
        producer.put(group(instance_id=[instance] * 4))
    with pytest.raises(NobodyAsks, match=r"2 groups wait .*\(5, 6\).* asks for 0 "):
        await generated(make_generator(match="instance", most_early=2), prompts(1, 4))


async def test_the_event_loop_goes_on_while_nothing_comes(make_generator, producer, prompts):
    generator = make_generator()
    call = asyncio.create_task(generated(generator, prompts(1, 4)))
    turns = 0
    while turns < 200:
        await asyncio.sleep(0)
        turns += 1
    assert not call.done()
    producer.put(group())
    assert (await call)["rewards"]


async def test_a_cancelled_call_leaves_its_groups(make_generator, producer, prompts):
    generator = make_generator()
    call = asyncio.create_task(generator.generate(prompts(2, 4)))
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    for number in range(2):
        producer.put(group(), group_id=f"g{number}")
    output = await generated(generator, prompts(2, 4))
    assert [row["group_id"] for row in output["env_metrics"]] == ["g0"] * 4 + ["g1"] * 4
    assert not output["env_metrics"][0]["redelivered"]


@pytest.fixture
def put_on(make_producer):
    """Puts groups into a lane of 64 KiB, which holds four of them, until the test ends."""
    over = threading.Event()

    def put():
        producer = make_producer()
        while not over.is_set():
            with contextlib.suppress(shmbridge.LaneFull, shmbridge.BridgeDraining):
                producer.put(group(size=250), timeout_s=0.25)

    environment = threading.Thread(target=put)
    environment.start()
    yield
    over.set()
    environment.join()


async def test_groups_that_wait_in_skyrls_buffer_for_others_that_have_no_room(
    make_generator, put_on, prompts
):
    """As its asynchronous trainer asks, one prompt a call, and trains once it has all of a step."""
    generator = make_generator(of_feed={"groups": 20})
    calls = [generator.generate(prompts(1, 4, first=each)) for each in range(20)]
    with pytest.raises(shmbridge.BatchTooBig, match=r"holds \d+ records .*trainer has \d of the 20 groups"):
        await asyncio.gather(*calls)


async def test_the_mean_score_is_said_by_environment(make_generator, make_producer, prompts):
    """Of all, and of each; SkyRL's own metrics of rewards are of advantages."""
    for env_name, scores in (("math", [0.0, 1.0, 1.0, 0.0]), ("chess", [4.0, 4.0, 4.0])):
        with make_producer(env_name=env_name) as producer:
            producer.put(group(rows=len(scores), score=scores))
    metrics = (await generated(make_generator(), prompts(2, 4)))["rollout_metrics"]
    assert metrics["shmbridge/score_mean/math"] == 0.5
    assert metrics["shmbridge/score_mean/chess"] == 4.0
    assert metrics["shmbridge/score_mean"] == pytest.approx(2.0)  # 14 / 7: masked rows have none


async def test_stale_groups_are_discarded_by_the_bridge(make_generator, producer, prompts):
    generator = make_generator(of_feed={"max_staleness": 1})
    generator.feed.consumer.publish_policy_version(6)
    producer.put(group(), group_id="old", policy_version=3)
    producer.put(group(), group_id="new", policy_version=5)
    output = await generated(generator, prompts(1, 4))
    assert output["env_metrics"][0]["group_id"] == "new"
    assert output["env_metrics"][0]["min_policy_version"] == 5
    assert output["rollout_metrics"]["shmbridge/staleness_max"] == 1
    assert output["rollout_metrics"]["shmbridge/policy_version_max"] == 6
    assert generator.feed.stats()["discarded_total{stale}"] == 1


async def test_other_columns_arrive_as_they_are_or_are_counted(make_generator, producer, prompts):
    steps = {"step_rewards": [[0.25, 1.0]] * 4, "step_ends": [[4, 6]] * 4, "trace_spans": [[2, 4]] * 4}
    producer.put(group(**steps, token_versions=[[-1, -1, 3, 3, 4, 4]] * 4, temperature=[0.7] * 4))
    generator = make_generator()
    output = await generated(generator, prompts(1, 4))
    row = output["env_metrics"][2]
    assert row["step_rewards"].tobytes() == np.array([0.25, 1.0], np.float32).tobytes()
    assert row["step_ends"].tobytes() == np.array([4, 6], np.int32).tobytes()
    assert row["trace_spans"].tolist() == [2, 4]
    assert row["token_versions"].tolist() == [-1, -1, 3, 3, 4, 4]
    assert output["rollout_metrics"]["shmbridge/columns_ignored{temperature}"] == 4
    assert [name for name in generator.stats() if name.startswith("columns_ignored")] == [
        "columns_ignored{temperature}"
    ]


async def test_rows_that_skyrl_cannot_take_as_they_are(make_generator, producer, prompts):
    rows = group(rows=3) | {
        "tokens": [np.arange(6, dtype=np.int32), np.arange(1, dtype=np.int32), np.arange(6, dtype=np.int32)],
        "prompt_length": [6, 1, 0],
        "loss_mask": [np.zeros(6, np.uint8), np.zeros(1, np.uint8), np.ones(6, np.uint8)],
        "advantages": [np.zeros(6, np.float32), np.zeros(1, np.float32), np.ones(6, np.float32)],
        "inference_logprobs": [np.zeros(6, np.float32), np.zeros(1, np.float32), -np.ones(6, np.float32)],
    }
    producer.put(rows)
    output = await generated(make_generator(3), prompts(1, 3))
    assert output["prompt_token_ids"] == [[0, 1, 2, 3, 4], [0], [0]]
    assert output["response_ids"] == [[5], [0], [1, 2, 3, 4, 5]]
    assert output["loss_masks"] == [[0], [0], [1] * 5]
    assert output["rollout_metrics"]["shmbridge/rows_without_response"] == 2


async def test_a_group_is_held_until_its_prompt_is_trained(make_generator, producer, prompts):
    for _ in range(2):
        producer.put(group())
    generator = make_generator()
    consumer = generator.feed.consumer
    for prompt in range(2):
        await generated(generator, prompts(1, 4, first=prompt))
    assert generator.held == consumer.stats()["held"] == 2
    generator.trained(["1"])
    assert consumer.current_step == 1
    generator.trained(["1", "never"])
    assert generator.held == consumer.stats()["held"] == consumer.current_step == 1
    generator.trained(["0"])
    wait_until(lambda: consumer.stats()["held"] == 0)


async def test_a_prompt_that_is_asked_for_again_gets_its_group_again(make_generator, producer, prompts):
    """As SkyRL's dynamic sampling does with prompts that it left out."""
    for number in range(3):
        producer.put(group(), group_id=f"g{number}")
    generator = make_generator()
    found = [await generated(generator, prompts(1, 4)) for _ in range(3)]
    assert [output["env_metrics"][0]["group_id"] for output in found] == ["g0", "g1", "g0"]
    assert generator.held == 1


async def test_rows_that_cannot_be_trained_are_places_without_loss(make_generator, producer, prompts):
    """Some of a group's rows, and all of them."""
    producer.put(group(instance_id=["a"] * 4), group_id="first")
    long = group(first=1, size=9, instance_id=["b"] * 4)
    producer.put(long, group_id="second")
    generator = make_generator(
        of_feed={"groups": 2, "unfit": "leave_out", "longest_row": 8, "vocabulary": 44}
    )
    output = await generated(generator, prompts(2, 4))
    assert [sum(mask) for mask in output["loss_masks"]] == [4, 4, 4, 0, 0, 0, 0, 0]
    assert [row["instance_id"] for row in output["env_metrics"][3:5]] == ["a", "b"]
    assert output["rollout_metrics"]["shmbridge/rows_left_out"] == 5
    assert generator.feed.stats()["feed_rows_left_out_too_long_total"] == 4


async def test_an_evaluation_needs_a_generator_of_its_own(make_generator, prompts):
    from shmbridge.consumers.skyrl.generator import NotEvaluated

    class Evaluator:
        async def generate(self, input_batch):
            return input_batch

    given = prompts(1, 4, phase="eval")
    with pytest.raises(NotEvaluated, match=r"eval_interval=-1"):
        await make_generator().generate(given)
    assert await make_generator(evaluator=Evaluator()).generate(given) is given


async def test_what_ends_a_call(make_generator, producer, prompts):
    from shmbridge.consumers.feed import Drained

    with pytest.raises(shmbridge.ConsumerEmpty, match="1 of 1 lanes have a producer"):
        await make_generator(timeout_s=0.1).generate(prompts(1, 4))
    with pytest.raises(ValueError, match=r"prompt '0' has 3 rows .*answers with 4"):
        await make_generator().generate(prompts(1, 3))
    producer.put(group())
    generator = make_generator()
    generator.feed.drain()
    with pytest.raises(Drained, match="1 groups are there for a step of 2 groups"):
        await generator.generate(prompts(2, 4))


async def test_groups_of_several_calls_go_together_in_skyrl(make_generator, producer, prompts):
    from skyrl.train.generators.utils import concatenate_generator_outputs

    producer.put(group(rows=3, temperature=[0.5] * 3), policy_version=1)
    producer.put(group(rows=2, temperature=[0.5] * 2), policy_version=2)
    generator = make_generator()
    outputs = [await generated(generator, prompts(1, 4, first=each)) for each in range(2)]
    whole = concatenate_generator_outputs(outputs)
    assert len(whole["env_metrics"]) == len(whole["trajectory_ids"]) == 8
    assert whole["rollout_metrics"]["shmbridge/rows_masked"] == 3
    assert whole["rollout_metrics"]["shmbridge/columns_ignored{temperature}"] == 5
    assert whole["rollout_metrics"]["generate/avg_num_tokens"] == pytest.approx((5 * 4 + 3) / 8)
