"""Make src/pirl/models/assets/tiny_tokenizer.model: a 1 024-token SentencePiece model of robot instructions.

Special ids are PaliGemma's (pad 0, eos 1, bos 2, unk 3); bytes it has never seen fall back to byte tokens, digits stand
alone, and a newline is one token, so both prompt formats work on it.
"""

import io
import random
from pathlib import Path

import sentencepiece

VERBS = (
    "pick up|put|place|push|pull|open|close|fold|unfold|stack|lift|grasp|move|slide|insert|pour|press|turn on|turn off|"
    "wipe|hand over|transfer|reach|rotate|drop|hang|sort|assemble|pack|sweep|twist|hold|release|give|uncap|cover|align|"
    "unplug|plug|flip|shake|peel|cut|zip|scoop|throw|stir"
)
COLORS = "red|blue|green|yellow|orange|purple|white|black|grey|pink|cyan|brown"
OBJECTS = (
    "block|cube|ball|cup|bowl|plate|drawer|towel|box|bottle|peg|lid|door|button|handle|pan|stove|basket|cabinet|shelf|"
    "spoon|pen|shirt|cloth|tray|mug|can|ring|socket|puck|stick|bread|object|gripper|microwave|book|cheese|butter|milk|"
    "sauce|wine|rack|nut|lever|window|faucet|hammer|coffee|tomato|soup|marker|sponge|knife|fork|apple|carrot"
)
PLACES = "zone|goal|area|table|corner|circle|square|target|left|right|top|middle|front|back|side|bottom"
PREPOSITIONS = "in|on|into|onto|next to|behind|under|to|from|inside|near|beside|with|between|at|over|off"


def corpus(lines: int = 6000, seed: int = 0) -> list[str]:
    """Instructions in the style of robot datasets, some of them in the π₀.₅ prompt format."""
    draw = random.Random(seed)
    verbs, colors, objects, places, prepositions = (
        words.split("|") for words in (VERBS, COLORS, OBJECTS, PLACES, PREPOSITIONS)
    )
    sentences = []
    for _ in range(lines):
        verb, color, thing, where = (draw.choice(words) for words in (verbs, colors, objects, prepositions))
        other = f"{draw.choice(colors)} {draw.choice(places + objects)}"
        sentence = draw.choice(
            [
                f"{verb} the {color} {thing} {where} the {other}",
                f"{verb} the {thing}",
                f"{verb} the {color} {thing}",
                f"{verb} the {thing} {where} the {draw.choice(places)}",
                f"{verb} the {thing} and {draw.choice(verbs)} it with the {draw.choice(['left', 'right'])} arm",
                f"put the {color} {thing} in the {draw.choice(colors)} zone",
            ]
        )
        sentence = sentence.capitalize() if draw.random() < 0.5 else sentence
        sentences.append(sentence)
        if draw.random() < 0.3:
            state = " ".join(str(draw.randrange(-1, 256)) for _ in range(draw.choice((4, 8, 14))))
            sentences += [f"Task: {sentence}, State: {state};", "Action: "]
        if draw.random() < 0.05:
            sentences.append(f"Advantage: {draw.choice(['positive', 'negative'])}")
    return sentences


def main() -> None:
    """Train and write the model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=model,
        vocab_size=1024,
        model_type="bpe",
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        byte_fallback=True,
        split_digits=True,
        user_defined_symbols=["\n"],
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        character_coverage=1.0,
    )
    target = Path(__file__).parents[1] / "src/pirl/models/assets/tiny_tokenizer.model"
    target.write_bytes(model.getvalue())
    print(f"{target.name}: {len(model.getvalue())} bytes")


if __name__ == "__main__":
    main()
