"""The forms that an answer may have to have: schemas, grammars, calls of tools."""
