"""Schemas of MCP servers' tools, as clients hand them on: `tools/list` of released servers.

They are those of modelcontextprotocol/servers (filesystem, memory, sequential-thinking, git, fetch,
everything), of its archive (puppeteer) and of github/github-mcp-server, without descriptions.
Nobody of them forbids further properties, and each writes what its library makes: zod or pydantic.
"""

import json
import re

import pytest

from quantflow.models.tokenizer import load_tokenizer
from quantflow.server import tools as tooling
from quantflow.server.bodies import Tool
from quantflow.server.grammar import Grammars

TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "number"}, {"type": "boolean"}
NULLABLE = {"anyOf": [TEXT, {"type": "null"}], "default": None}
ZOD = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}
WORD_OR_FLAG = {"type": ["boolean", "string"]}
COUNT = {"type": "integer", "minimum": 1, "maximum": 9007199254740991}


def listed(items):
    return {"type": "array", "items": items}


def of(properties, *required):
    return {"type": "object", "properties": properties, "required": list(required)}


EDIT = of({"oldText": TEXT, "newText": TEXT}, "oldText", "newText")
ENTITY = of({"name": TEXT, "entityType": TEXT, "observations": listed(TEXT)}, "name", "entityType")
# one of three, and the object beside them
ITEM = {
    "type": "object",
    "oneOf": [
        of({"node_id": TEXT}, "node_id") | {"additionalProperties": False},
        of({"item_id": {"type": "integer"}}, "item_id") | {"additionalProperties": False},
        of({"owner": TEXT, "number": {"type": "integer"}}, "owner", "number")
        | {"additionalProperties": False},
    ],
}
# tool -> schema, arguments that fit, arguments that do not
TOOLS = {
    "edit_file": (
        ZOD
        | of({"path": TEXT, "edits": listed(EDIT), "dryRun": FLAG | {"default": False}}, "path"),
        {"path": "a", "edits": [{"oldText": "x", "newText": ""}, {"oldText": "", "newText": "é"}]},
        {"path": "a", "edits": [{"oldText": "x"}]},
    ),
    "directory_tree": (
        ZOD | of({"path": TEXT, "excludePatterns": listed(TEXT) | {"default": []}}, "path"),
        {"path": "/a b/c", "excludePatterns": []},
        {"path": "a", "exclude": []},
    ),
    "list_directory_with_sizes": (
        ZOD | of({"path": TEXT, "sortBy": TEXT | {"enum": ["name", "size"], "default": "name"}}),
        {"path": "a", "sortBy": "size"},
        {"path": "a", "sortBy": "date"},
    ),
    "list_allowed_directories": (ZOD | {"properties": {}}, {}, {"path": "a"}),
    "create_entities": (
        ZOD | of({"entities": listed(ENTITY)}, "entities"),
        {"entities": [{"name": "a", "entityType": "b", "observations": ["c", "d"]}]},
        {"entities": [{"name": "a", "entityType": "b", "observations": "c"}]},
    ),
    "sequentialthinking": (
        ZOD
        | of(
            {
                "thought": TEXT,
                "nextThoughtNeeded": WORD_OR_FLAG,
                "thoughtNumber": COUNT,
                "totalThoughts": COUNT,
                "isRevision": WORD_OR_FLAG,
                "branchId": TEXT,
            },
            *("thought", "nextThoughtNeeded", "thoughtNumber", "totalThoughts"),
        ),
        {"thought": "a", "nextThoughtNeeded": "true", "thoughtNumber": 1, "totalThoughts": 3},
        {"thought": "a", "nextThoughtNeeded": True, "thoughtNumber": 0, "totalThoughts": 3},
    ),
    "git_log": (
        of(
            {
                "repo_path": TEXT,
                "max_count": {"type": "integer", "default": 10},
                "start_timestamp": NULLABLE,
                "end_timestamp": NULLABLE,
            },
            "repo_path",
        ),
        {"repo_path": ".", "max_count": 3, "start_timestamp": None, "end_timestamp": "2 weeks ago"},
        {"repo_path": ".", "start_timestamp": 5},
    ),
    "fetch": (
        of(
            {
                "url": TEXT | {"format": "uri", "minLength": 1},
                "max_length": {
                    "type": "integer",
                    "default": 5000,
                    "minimum": 1,
                    "maximum": 999999,
                },
                "start_index": {"type": "integer", "default": 0, "minimum": 0},
                "raw": FLAG | {"default": False},
            },
            "url",
        ),
        {"url": "https://example.org/a?b=c#d", "max_length": 999999, "raw": True},
        {"url": "https://example.org", "max_length": 1000000},
    ),
    "gzip-file-as-resource": (
        ZOD | {"properties": {"name": TEXT, "data": TEXT | {"format": "uri"}}},
        {"name": "README.md.gz", "data": "https://example.org"},
        {"name": "a", "data": 5},
    ),
    "puppeteer_navigate": (
        of({"url": TEXT, "launchOptions": {"type": "object"}, "allowDangerous": FLAG}, "url"),
        {
            "url": "a",
            "launchOptions": {"args": ["--x"], "env": {"A": None}},
            "allowDangerous": True,
        },
        {"url": "a", "launchOptions": []},
    ),
    "list_issues": (
        of(
            {
                "direction": TEXT | {"enum": ["ASC", "DESC"]},
                "field_filters": listed(of({"field_name": TEXT, "value": TEXT}, "field_name")),
                "fields": listed(TEXT | {"enum": ["number", "title", "body"]}),
                "perPage": NUMBER | {"minimum": 1, "maximum": 100},
            }
        ),
        {"direction": "ASC", "field_filters": [], "fields": ["title", "body"], "perPage": 100},
        {"fields": ["author"]},
    ),
    "push_files": (
        of(
            {
                "branch": TEXT,
                "files": listed(
                    of({"content": TEXT, "path": TEXT}, "path", "content")
                    | {"additionalProperties": False}
                ),
            },
            *("branch", "files"),
        ),
        {"branch": "main", "files": [{"content": "a\n", "path": "b"}]},
        {"branch": "main", "files": [{"content": "a", "path": "b", "mode": 1}]},
    ),
    "issue_write": (
        of(
            {
                "method": TEXT | {"enum": ["create", "update"]},
                "issue_fields": listed(
                    of({"field_name": TEXT, "value": {"type": ["string", "number", "boolean"]}})
                    | {"additionalProperties": False}
                ),
                "type": {"anyOf": [TEXT | {"minLength": 1}, {"type": "null"}]},
            },
            "method",
        ),
        {"method": "update", "issue_fields": [{"field_name": "a", "value": 1.5}], "type": None},
        {"method": "update", "type": ""},
    ),
    "projects_write": (
        of({"items": listed(ITEM), "updated_field": {"type": "object"}}),
        {"items": [{"item_id": 5}, {"owner": "a", "number": 7}], "updated_field": {"id": 1}},
        {"items": [{"node_id": "a", "item_id": 5}]},
    ),
}
OFFERED = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, (schema, _, _) in TOOLS.items()
]


@pytest.fixture(scope="module")
def follows(artifact):
    """A function: whether a call of some tools that is forced may be a text."""
    tokenizer = load_tokenizer(artifact)
    grammars = Grammars(
        tokenizer, vocab_size=len(tokenizer), ends=(end := [tokenizer.eos_token_id])
    )

    def follows(tools, choice, text):
        mask = grammars.mask(tooling.forced([Tool(**one) for one in tools], choice))
        assert mask.left_out == ()
        for token in [*tokenizer.encode(text, add_special_tokens=False), *end]:
            word = int(mask.allowed([])[token // 32])
            if not word >> token % 32 & 1:
                return False
            mask.advance(token)
        return True

    return follows


@pytest.mark.parametrize("name", TOOLS)
def test_a_forced_call_takes_what_the_tool_takes(follows, name):
    _, good, bad = TOOLS[name]
    tool = next(one for one in OFFERED if one["function"]["name"] == name)
    for tools, choice in (([tool], "required"), (OFFERED, "required")):
        for fits, arguments in ((True, good), (False, bad)):
            text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
            assert follows(tools, choice, text) == fits


def test_the_model_is_shown_the_schemas_as_they_are(server):
    body = {"messages": [{"role": "user", "content": "a"}], "tools": OFFERED}
    prompt = server.post("/chat_tokenize", body).json()["templated_text"]
    shown = json.loads(re.search("^tools: (.*)$", prompt, re.MULTILINE)[1])
    assert [one["function"]["parameters"] for one in shown] == [one for one, _, _ in TOOLS.values()]
