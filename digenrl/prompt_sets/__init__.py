"""Prompt sets that ship with DigenRL: grammars that write any number of prompts. Pure functions of a seed."""
