"""The rewards without downloaded weights: JPEG size and OCR."""

from __future__ import annotations

import itertools
from io import BytesIO

import numpy
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from rapidocr import RapidOCR
from rapidocr.ch_ppocr_rec import TextRecognizer, TextRecOutput
from rapidocr.utils.output import RapidOCROutput
from torch import Tensor

from digenrl.config.rewards.quoted_text import quoted
from digenrl.config.rewards.table import OcrSettings, TextMatch, parse_reward
from digenrl.rewards.building import build_reward
from digenrl.rewards.contract import Reward, RewardError
from digenrl.rewards.ocr import OcrReward, edit_distance, normalized, text_similarity

ANSWERS = TextRecOutput(txts=("1234", "1234", "1235"), scores=(0.9, 0.3, 0.9))


@pytest.fixture(scope="module")
def ocr() -> OcrReward:
    return OcrReward(OcrSettings(exact_bonus=0.5))


@pytest.fixture(scope="module")
def line_reader() -> OcrReward:
    return OcrReward(OcrSettings(detect=False, width=96))


def writing(text: str, height: int = 64, letters: int = 20, ink: str = "black") -> Tensor:
    """(1, 3, H, W): text on a light background, like the output of a decoder."""
    font = ImageFont.load_default(size=letters)
    image = Image.new("RGB", (max(height, int(font.getlength(text)) + 12), height), (240, 238, 225))
    ImageDraw.Draw(image).text((5, (height - letters) // 2 - 1), text, fill=ink, font=font)
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)[None].float() / 255


def score(reward: Reward, image: Tensor, prompt: str = "", **metadata: object) -> tuple[float, dict[str, float]]:
    batch = reward.score(image[None], [prompt], [metadata])
    return batch.values[0], {name: part[0] for name, part in batch.parts.items()}


def test_the_expected_text_scores_one_plus_the_exact_bonus(ocr: OcrReward) -> None:
    assert score(ocr, writing("OPEN 24"), text="open 24") == (1.5, {"similarity": 1.0, "exact": 1.0})


def test_the_expected_text_may_be_in_quotes_in_the_prompt(ocr: OcrReward) -> None:
    assert score(ocr, writing("Coffee"), prompt='a sign that says "Coffee"')[0] == 1.5


def test_a_near_miss_loses_the_share_of_wrong_letters(ocr: OcrReward) -> None:
    value, parts = score(ocr, writing("Coffee"), text="Toffees")  # one replaced, one missing, of seven
    assert value == pytest.approx(5 / 7)
    assert parts["exact"] == 0.0


def test_the_expected_text_among_other_text_scores_one_without_the_bonus(ocr: OcrReward) -> None:
    assert score(ocr, writing("Coffee house"), text="Coffee") == (1.0, {"similarity": 1.0, "exact": 0.0})
    assert score(ocr, writing("Coffee house"), text="X")[0] == 0.0


# Expected text, what was read, and the score of each way to match them, worked out by hand.
MATCHES = [
    ("OPEN", "OPEN", 1.0, 1.0, 1.0),
    ("OPEN", "OPEN 24h", 1.0, 1 / 4, 4 / 7),
    ("OPEN", "welcome OPEN now", 1.0, 0.0, 4 / 14),
    ("OPEN", "0PEN", 3 / 4, 3 / 4, 3 / 4),
    ("OPEN", "", 0.0, 0.0, 0.0),
    ("OPEN", "PEN", 3 / 4, 3 / 4, 3 / 4),
    ("OPEN", "something else", 0.0, 0.0, 3 / 13),
    ("Happy Birthday", "happybirthday", 1.0, 1.0, 1.0),
]


@pytest.mark.parametrize(("expected", "read", "contained", "target", "whole"), MATCHES)
def test_texts_are_matched_as_configured(
    expected: str, read: str, contained: float, target: float, whole: float
) -> None:
    ways: dict[TextMatch, float] = {"contained": contained, "target": target, "whole": whole}
    for match, similarity in ways.items():
        assert text_similarity(normalized(expected), normalized(read), match) == pytest.approx(similarity), match


def test_a_video_scores_the_mean_over_all_frames_or_over_those_that_score(
    ocr: OcrReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ["OPEN", "XYZ", "OPE", "", *[""] * 4]  # two videos of four frames; nothing is in the second
    monkeypatch.setattr(ocr, "read", lambda images: read)
    videos = torch.full((2, 4, 3, 8, 8), 0.5)
    for frame_mean, mean in (("all", (1.5 + 0.75) / 4), ("positive", (1.5 + 0.75) / 2)):
        monkeypatch.setattr(ocr, "frame_mean", frame_mean)
        batch = ocr.score(videos, ['"open"'] * 2, [{}] * 2)
        assert batch.values == pytest.approx((mean, 0.0))
        assert batch.parts["exact"] == pytest.approx((0.25 if frame_mean == "all" else 0.5, 0.0))


def test_other_text_and_no_text_score_zero(ocr: OcrReward) -> None:
    assert score(ocr, writing("XYZ"), text="open")[0] == 0.0
    assert score(ocr, torch.full((1, 3, 48, 48), 0.9), text="open")[0] == 0.0


def test_small_images_are_readable(ocr: OcrReward) -> None:
    for height, text in itertools.product((24, 32), ("Exit", "Hotel", "4071")):
        assert score(ocr, writing(text, height, letters=12), text=text)[1]["exact"] == 1.0


def test_the_recognizer_receives_colors_in_its_channel_order(
    ocr: OcrReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(RapidOCR, "__call__", lambda self, image: (seen.append(image), RapidOCROutput())[1])
    red = torch.zeros(1, 3, 300, 300)
    red[:, 0] = 1.0
    score(ocr, red, text="x")
    assert seen[0][0, 0].tolist() == [0, 0, 255]


def test_an_image_of_one_line_is_read_without_detection(line_reader: OcrReward) -> None:
    texts = ("4071", "9926", "1358")
    pictures = torch.stack([writing(text, height=32, letters=22)[:, :, :, :60] for text in texts])
    batch = line_reader.score(pictures, ['"4071"', '"9928"', '"2469"'], [{}] * 3)
    assert batch.parts == {"similarity": (1.0, 0.75, 0.0), "exact": (1.0, 0.0, 0.0)}


def test_without_detection_all_images_are_read_in_one_batch_at_their_own_size(
    line_reader: OcrReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(RapidOCR, "recognize_txt", lambda self, lines: (seen.append(lines), ANSWERS)[1])
    red = torch.zeros(3, 1, 3, 32, 64)
    red[:, :, 0] = 1.0
    batch = line_reader.score(red, ['"1234"'] * 3, [{}] * 3)
    assert [picture.shape for picture in seen[0]] == [(32, 64, 3)] * 3
    assert seen[0][0][0, 0].tolist() == [0, 0, 255]
    assert batch.values == (1.0, 0.0, 0.75)  # the confidence of the second is too low


def test_the_recognizer_has_the_configured_width_and_widens_for_longer_lines(line_reader: OcrReward) -> None:
    shapes = []
    prepare = TextRecognizer.resize_norm_img

    def noted(self: TextRecognizer, image: numpy.ndarray, ratio: float) -> numpy.ndarray:
        line = prepare(self, image, ratio)
        shapes.append(line.shape)
        return line

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextRecognizer, "resize_norm_img", noted)
        assert score(line_reader, writing("4071", height=32, letters=22), text="4071")[0] == 1.0
        assert score(line_reader, writing("Coffee house", height=32), text="coffee house")[0] == 1.0
    assert shapes[0] == (3, 48, 96)
    assert shapes[1][2] > 96


def test_a_sample_without_an_expected_text_is_an_error_that_names_it(ocr: OcrReward) -> None:
    two = torch.stack([writing("Exit"), writing("Exit")])
    with pytest.raises(RewardError, match="'a cat'") as caught:
        ocr.score(two, ['"Exit"', "a cat"], [{}, {}])
    assert caught.value.samples == (1,)
    with pytest.raises(RewardError, match=r"metadata 'text'.*5"):
        score(ocr, writing("5"), text=5)


def test_quotes_of_several_kinds_are_found_and_apostrophes_are_not() -> None:
    assert quoted("it's the dog's \"bone\" and “ball” and «os»") == "bone ball os"
    assert quoted("it's nothing") == ""


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [
        ("", "", 0),
        ("abc", "", 3),
        ("kitten", "sitting", 3),
        ("flaw", "lawn", 2),
        ("same", "same", 0),
        ("ab", "ba", 2),
    ],
)
def test_edit_distance_counts_insertions_deletions_and_replacements(one: str, other: str, distance: int) -> None:
    assert edit_distance(one, other) == edit_distance(other, one) == distance


def test_jpeg_rewards_are_the_size_of_the_file_written_by_pillow() -> None:
    image = torch.rand(3, 40, 56, generator=torch.Generator().manual_seed(3))
    file = BytesIO()
    rounded = (image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    Image.fromarray(rounded).save(file, format="JPEG", quality=80)
    kilobytes = len(file.getvalue()) / 1000
    for name, sign in (("jpeg_compressibility", -1), ("jpeg_incompressibility", 1)):
        reward = build_reward(parse_reward({"name": name, "quality": 80}))
        assert score(reward, image[None]) == (sign * kilobytes, {"kilobytes": kilobytes})


def test_a_flat_image_compresses_better_than_noise() -> None:
    reward = build_reward(parse_reward("jpeg_compressibility"))
    noise = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert score(reward, torch.full((1, 3, 32, 32), 0.3))[0] > score(reward, noise)[0]
