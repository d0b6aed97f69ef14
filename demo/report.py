from __future__ import annotations
from pathlib import Path
from demo.board import Board
def summary(board: Board) -> str:
    return f"{board.start_accuracy()} -> {board.latest('accuracy')}"
def draw(board: Board, path: Path) -> Path:
    return path
