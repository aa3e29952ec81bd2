"""The functions of C++ and CUDA source, for the rules of test_layout.py."""

import re

COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|^ *#(?:[^\n\\]|\\\n|\\.)*", re.S | re.M)
SCOPE = re.compile(r"\b(namespace|struct|class|enum|union|extern)\b")
LAUNCH_BOUNDS = re.compile(r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)|__attribute__\(\(.*?\)\)+")


def functions(source):
    """[(name, first line, lines, parameters)] of the functions that are defined outside of others, formatted
    sources.
    """
    text = COMMENTS.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)
    found, scopes, start, depth = [], [], 0, 0  # start: of the statement that ends in a brace
    for i, char in enumerate(text):
        if char in "()":
            depth += 1 if char == "(" else -1
        elif depth:
            continue
        elif char == "{":
            head = text[start:i]
            without_template = re.sub(r"template <.*?>\s*(?=\w)", "", head, flags=re.S)
            if SCOPE.search(without_template) and not without_template.rstrip().endswith(")"):
                kind = "scope"
            else:
                kind = "function" if "(" in head and all(kind == "scope" for kind, *_ in scopes) else "block"
            scopes.append((kind, start + len(head) - len(head.lstrip()), head))
            start = i + 1
        elif char == "}":
            kind, begin, head = scopes.pop()
            if kind == "function":
                name, parameters = signature(LAUNCH_BOUNDS.sub("", head))
                found.append((name, text.count("\n", 0, begin) + 1, text.count("\n", begin, i) + 1, parameters))
            start = i + 1
        elif char == ";":
            start = i + 1
    return found


def signature(head):
    name = re.search(r"(operator[^\w\s]+|[\w~]+)(<[^()]*>)?\s*\(", head)
    depth, commas, parameters = 1, 0, ""
    for char in head[name.end() :]:
        depth += (char in "(<[{") - (char in ")>]}")
        if not depth:
            break
        commas += char == "," and depth == 1
        parameters += char
    return name[1], commas + 1 if parameters.strip() else 0
