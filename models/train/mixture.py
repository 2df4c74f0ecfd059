"""What the model is trained on: an endless, seeded stream of examples."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

from eval.library_text import LibraryEntry
from eval.tasks import LONG_TASKS, SHORT_TASKS, Problem, draw, draw_long
from eval.tasks.arithmetic import addition
from eval.tasks.problem import is_held_out
from models.train.json_talk import json_talk
from models.train.small_talk import small_talk
from models.train.tool_talk import tool_talk
from tools.chat import Example, Turn, conversation, learned_conversation, plain_text

SYSTEMS = (
    "You are a helpful assistant.",
    "You are tiny-r1, a small reasoning model.",
    "You are a careful assistant that thinks step by step.",
    "Answer the user's questions.",
    "Be brief and exact.",
    "You are a friendly teacher.",
)
RESULT_ONLY = ("Give only the result.", "Answer with the result only.", "Reply with nothing but the result.")
OPENINGS = ("Hello! ", "Please help me. ", "Question: ", "Next one. ", "Hi, ")
ASK_ENTRY = ("What does {name} do?", "Explain {name}.", "What is {name}?")
ADD_TO_THAT = ("Now add {number} to that.", "Add {number} to the result.", "And plus {number}?")
# Tasks that need more practice than the others are drawn more often.
TASK_WEIGHTS: Mapping[str, float] = MappingProxyType(
    {
        "multiply": 2.0,
        "subtract": 1.5,
        "divide": 1.5,
        "sort_numbers": 1.5,
        "sort_words": 1.5,
        "convert_units": 1.5,
        "word_problem": 2.0,
        "edit_string": 1.5,
        "look_up": 0.7,
    }
)
ROUGH_CHARACTERS_PER_TOKEN: Mapping[str, float] = MappingProxyType(dict.fromkeys(LONG_TASKS, 3.0))
# Tasks that are easy enough to be answered without thinking.
QUICK_TASKS = ("copy_text", "look_up")


@dataclass(frozen=True)
class Mixture:
    """Shares of the examples that are drawn; the rest are single short problems."""

    long_share: float
    # Shortest and longest prompt of long problems; the logarithms of lengths are uniform.
    long_tokens: tuple[int, int]
    small_talk_share: float = 0.08
    library_share: float = 0.05
    conversation_share: float = 0.06
    # Answers without thinking, where no tools are offered either.
    quiet_share: float = 0.0
    # Conversations with tools, and answers in JSON.
    tool_share: float = 0.0
    json_share: float = 0.0


class ExampleStream:
    """Endless examples. Equal seeds give equal streams. No example is from the test split."""

    def __init__(
        self,
        mixture: Mixture,
        library: Sequence[LibraryEntry],
        seed: int | str,
        characters_per_token: Mapping[str, float] = ROUGH_CHARACTERS_PER_TOKEN,
    ) -> None:
        self.mixture = mixture
        self.characters_per_token = characters_per_token
        self.library = [entry for entry in library if not entry.is_held_out]
        self.random = Random(seed)
        self.tasks = list(SHORT_TASKS)
        self.weights = [TASK_WEIGHTS.get(name, 1.0) for name in SHORT_TASKS]

    def __iter__(self) -> Iterator[Example]:
        while True:
            yield self.example()

    def example(self) -> Example:
        mixture = self.mixture
        kinds = (
            (mixture.long_share, self._long_problem),
            (mixture.small_talk_share, self._small_talk),
            (mixture.library_share, self._library),
            (mixture.conversation_share, self._conversation),
            (mixture.quiet_share, self._quiet),
            (mixture.tool_share, self._tool_talk),
            (mixture.json_share, self._json_talk),
        )
        point = self.random.random()
        for share, make in kinds:
            point -= share
            if point < 0:
                return make()
        return self._short_problem()

    def _short_problem(self) -> Example:
        random = self.random
        if random.random() < 0.04:
            problem = draw(SHORT_TASKS[random.choice(QUICK_TASKS)], random, held_out=False)
            return conversation([Turn(problem.prompt, problem.reply)])
        problem = self._problem()
        style = random.random()
        if style < 0.05:
            return conversation(
                [Turn(problem.prompt, problem.answer, problem.reasoning)], system=random.choice(RESULT_ONLY)
            )
        opening = random.choice(OPENINGS) if style > 0.9 else ""
        return conversation([solved(problem, opening)], self._system())

    def _long_problem(self) -> Example:
        shortest, longest = self.mixture.long_tokens
        tokens = shortest * (longest / shortest) ** self.random.random()
        name = self.random.choice(list(LONG_TASKS))
        characters = round(tokens * self.characters_per_token[name])
        problem = draw_long(LONG_TASKS[name], self.random, characters, held_out=False)
        return conversation([solved(problem)], self._system())

    def _small_talk(self) -> Example:
        turn = small_talk(self.random)
        if self.random.random() < 0.15:
            turn = Turn(turn.prompt, turn.reply)
        return conversation([*self._earlier(0.2), turn], self._system())

    def _library(self) -> Example:
        entry = self.random.choice(self.library)
        if self.random.random() < 0.7:
            return plain_text(entry.document)
        prompt = self.random.choice(ASK_ENTRY).format(name=entry.name)
        return conversation([Turn(prompt, entry.first_sentence, f"I recall the documentation of {entry.name}.")])

    def _conversation(self) -> Example:
        if self.random.random() < 0.3:
            return conversation(self._follow_up(), self._system())
        return conversation([*self._earlier(1.0), solved(self._problem())], self._system())

    def _quiet(self) -> Example:
        style = self.random.random()
        if style < 0.6:
            turn = small_talk(self.random)
        elif style < 0.8:
            turn = solved(draw(SHORT_TASKS[self.random.choice(QUICK_TASKS)], self.random, held_out=False))
        else:
            # Their results are hardly to be had so; what is learned is to answer, and to end.
            turn = solved(self._problem())
        return conversation([*self._earlier(0.2), Turn(turn.prompt, turn.reply)], self._system())

    def _tool_talk(self) -> Example:
        talk = tool_talk(self.random, held_out=False)
        system = self._system()
        return learned_conversation(talk.turns, f"{system}\n\n{talk.system}" if system else talk.system)

    def _json_talk(self) -> Example:
        return learned_conversation(json_talk(self.random, held_out=False), self._system())

    def _follow_up(self) -> list[Turn]:
        """A sum, then a number to be added to it, so that the second turn needs the first."""
        while True:
            first = draw(SHORT_TASKS["add"], self.random, held_out=False)
            number = self.random.randrange(1000)
            second = addition(int(first.answer), number, self.random.choice(ADD_TO_THAT).format(number=number))
            if not is_held_out(second):
                return [solved(first), solved(second)]

    def _earlier(self, chance: float) -> list[Turn]:
        """With probability `chance` one to three earlier turns, otherwise none."""
        if self.random.random() >= chance:
            return []
        count = self.random.choice((1, 1, 1, 2, 2, 3))
        return [
            small_talk(self.random) if self.random.random() < 0.4 else solved(self._problem()) for _ in range(count)
        ]

    def _problem(self) -> Problem:
        name = self.random.choices(self.tasks, self.weights)[0]
        return draw(SHORT_TASKS[name], self.random, held_out=False)

    def _system(self) -> str:
        return self.random.choice(SYSTEMS) if self.random.random() < 0.25 else ""


def solved(problem: Problem, opening: str = "") -> Turn:
    return Turn(f"{opening}{problem.prompt}", problem.reply, problem.reasoning)
