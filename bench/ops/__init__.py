"""Operations of an agent: each is a function of a Session and JSON arguments that returns a JSON object."""
