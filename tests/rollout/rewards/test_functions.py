"""The shipped rewards: which answers mean the same, which letter is chosen, which shape is kept."""

from __future__ import annotations

import pytest

from megarl.rollout.rewards import format, math, multiple_choice
from megarl.types.reward_result import RewardResult

EXACT = "megarl.rollout.rewards.exact:score"


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"The answer is \boxed{\frac{1}{2}}", "0.5"),
        (r"so \boxed{72}", "72"),
        ("The final answer is 72.", "72"),
        ("#### 72", "72"),
        ("answer: 1,000", "1000"),
        (r"\boxed{(1,2)}", "(1, 2)"),
        (r"\boxed{x=3}", "3"),
        (r"\boxed{\frac12}", r"\frac{1}{2}"),
        (r"Thus $\sqrt{8}$", r"2\sqrt{2}"),
        (r"\boxed{2}, no: \boxed{3}", "3"),
        (r"\boxed{[0,1)}", "[0,1)"),
        (r"\boxed{-\frac{3}{4}}", "$-0.75$"),
        (r"\boxed{2^{100}}", "2^{100}"),
        (r"\boxed{10^{99999}}", "10^{99999}"),
        (r"\boxed{x^2+2x+1}", "(x+1)^2"),
        (r"\boxed{x^{2}+y^{2}}", "y^2+x^2"),
        (r"\boxed{90^\circ}", "90"),
        (r"\boxed{\dfrac{\pi}{2}}", r"\boxed{\frac{\pi}{2}}"),
        (r"\boxed{\text{east}}", r"\text{east}"),
        (r"\boxed{\text{true}}", "true"),
        (r"\boxed{1-\left(\frac{35}{36}\right)^{100}}", r"1-(\frac{35}{36})^{100}"),
        (r"\boxed{(1+x)^{100}}", "(x+1)^{100}"),
        (r"\boxed{3^{2^{5}}}", "3^{2^5}"),
        (r"\boxed{\dfrac{2024!}{2}}", r"\frac{2024!}{2}"),
        (r"\boxed{5.50}", r"\$5.50"),
        (r"\boxed{5.}", "5"),
        ("The total is **18**", "18"),
        ("#### **18**", "18"),
        ("it is `18`", "18"),
        ("so 2*3*4 = 24", "24"),
    ],
)
def test_math_that_means_the_same(response: str, answer: str) -> None:
    assert math.score(response, answer, {}).reward == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{3}, no: \boxed{2}", "3"),
        (r"\boxed{1,2,3}", "3"),
        (r"3 \boxed{}", "3"),
        (r"3 \boxed{3", "3"),
        ("", "3"),
        (r"\boxed{9^{9^{9^{9}}}}", "3"),
        (r"\boxed{\sum_{k=1}^{2} k}", "3"),
        (r"\boxed{3.1}", "3"),
        (r"\boxed{}", ""),
        ("3" + " " * 2000, "3"),
    ],
)
def test_math_that_does_not(response: str, answer: str) -> None:
    assert math.score(response, answer, {}).reward == 0.0
    assert math.score(response, answer, {}, wrong=-1.0).reward == -1.0


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The answer is B.", "B"),
        ("The answer is (C)", "C"),
        ("the answer is: **D**", "D"),
        (r"The answer is $\boxed{\text{(B)}}$.", "B"),
        (r"\boxed{\textbf{(C)}\ 5}", "C"),
        (r"A? \boxed{d}", "D"),
        ("Answer: A. Wait, answer: C", "C"),
        ("The correct option is D: 5", "D"),
        ("The answer is D, not B", "D"),
        ("B", "B"),
        ("I think so.\n(A)", "A"),
        ("A man eats. So C.", "C"),
        ("A. cats\nB. dogs\nSo it is B", "B"),
        (r"\boxed{A}, no: \boxed{B}", "B"),
        ("The answer is A. Option B is wrong.", "A"),
        ("The answer is A since option B is wrong.", "A"),
        ("Option A is tempting. Option C it is", "C"),
        ("<think>B?</think><answer>C</answer>", "C"),
        ("The answer is `B`", "B"),
        ('The answer is "B".', "B"),
        (r"The answer is \(B\)", "B"),
        (r"\boxed{B: \frac{1}{2}}", "B"),
        (r"\boxed{\text{B. Vitamin A}}", "B"),
        ("The answer is I don't know", None),
        (r"\boxed{A B}", None),
        (r"\boxed{A, B}", None),
        (r"\boxed{A or B}", None),
        (r"\boxed{Apple}", None),
        ("The answer is A or B", None),
        ("answer is A, B, C, D", None),
        ("A or B", None),
        ("(A) (B)", None),
        ("A\nB\nC\nD", None),
        ("So it's A and not B.", None),
        ("ABCD", None),
        ("the answer is an apple", None),
        ("The answer is Z", None),
        ("", None),
    ],
)
def test_a_letter_is_chosen_or_not_guessed(response: str, letter: str | None) -> None:
    assert multiple_choice.chosen(response, "ABCDEFGHIJ") == letter


def test_the_vote_counts_what_is_meant() -> None:
    """Right answers are one, however they are written; so are wrong ones that are written alike when simplified."""
    responses = (
        r"\boxed{\frac12}",
        "so it is 0.5",
        r"\boxed{1/2}",
        r"\boxed{ 0.50 }",
        r"\boxed{3}",
        "nothing",
    )
    answers = [math.score(response, "0.5", {}).answer for response in responses]
    assert answers == ["0.5"] * 4 + ["3", ""]
    assert multiple_choice.score("The answer is (C).", "B", {}).answer == "C"
    assert multiple_choice.score("B, or C", "B", {}).answer == ""


def test_a_letter_is_held_against_the_answer() -> None:
    assert multiple_choice.score("The answer is (C).", " (c) ", {}).reward == 1.0
    assert multiple_choice.score("The answer is (C).", "B", {}, wrong=-1.0).reward == -1.0
    assert multiple_choice.score("The answer is (C).", "C", {}, options="AB").reward == 0.0
    assert multiple_choice.score("Who knows?", "", {}).reward == 0.0


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>one\ntwo</think><answer>3</answer>", 1.0),
        ("\n<think></think>\n<answer></answer>\n", 1.0),
        ("<think>one</think><answer>3</answer> and more", 0.0),
        ("<think>one</think><think>two</think><answer>3</answer>", 0.0),
        ("<think>one<answer>3</answer></think><answer>4</answer>", 0.0),
        ("<answer>3</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_a_format_is_kept_or_not(response: str, reward: float) -> None:
    assert format.score(response, "3", {}) in (reward, RewardResult(reward, False, ""))


def test_a_format_and_what_is_inside() -> None:
    def judged(response: str, **more: object) -> object:
        return format.score(response, "3", {}, function=EXACT, reward=0.1, wrong=-1.0, **more)  # type: ignore[arg-type]

    assert judged("<think>so</think> <answer> 3 </answer>") == RewardResult(1.1, True, "3")
    assert judged("<think>so</think> <answer>4</answer>") == RewardResult(0.1, False, "4")
    assert judged("3") == RewardResult(-1.0, False, "")
    assert judged("3", pattern=r"\d") == RewardResult(1.1, True, "3")
    calls = {"turns": [{"calls": [{}, {}]}]}
    of_calls = "tests.rollout.rewards.odd_rewards:of_episode"
    inside = format.score("3", "3", {}, pattern=r"\d", function=of_calls, reward=0.0, episode=calls)
    assert inside == RewardResult(2.0, True, "3"), "which gets the episode, too"
    with pytest.raises(ValueError, match="returned 'good'"):
        format.score(
            "words", "3", {}, pattern=r"\w+", function="tests.rollout.rewards.odd_rewards:score"
        )
