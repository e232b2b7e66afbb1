"""The provenance of an artifact in two standard forms; both follow from its manifest alone.

    ARTIFACT.intoto.json    an in-toto Statement v1 with a SLSA Provenance v1 predicate: source
                            hashes, recipe, tools
    ARTIFACT.cdx.json       a CycloneDX 1.6 bill of materials: the model, its source, its files

Neither holds a time, a host or a path, so the same artifact has the same texts.
"""

from collections.abc import Mapping
from typing import Any

STATEMENT_SUFFIX, BOM_SUFFIX = ".intoto.json", ".cdx.json"
_BUILD_TYPE = "https://quantflow.dev/export/v1"


def statement(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The in-toto statement of an artifact.

    Source: in-toto.io/Statement/v1, slsa.dev/provenance/v1.
    """
    source = manifest["source"]
    subjects = [
        {"name": name, "digest": {"sha256": row["sha256"]}}
        for name, row in sorted(manifest["files"].items())
    ]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [
            {"name": "quantflow.json", "digest": {"quantflow": manifest["digest"]}},
            *subjects,
        ],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": _BUILD_TYPE,
                "externalParameters": {
                    "recipe": manifest["recipe"],
                    "source": source["name"],
                    "revision": source["revision"],
                },
                "internalParameters": {
                    "measurement": manifest["measurement"],
                    "float8": manifest["float8"],
                },
                "resolvedDependencies": [
                    {"name": name, "digest": {"sha256": digest}}
                    for name, digest in sorted(source["files"].items())
                ],
            },
            "runDetails": {
                "builder": {"id": _BUILD_TYPE, "version": manifest["tools"]},
                "metadata": {"invocationId": manifest["made_from"]},
            },
        },
    }


def bill_of_materials(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The CycloneDX ML-BOM of an artifact. Source: cyclonedx.org, schema bom-1.6."""
    source, recipe = manifest["source"], manifest["recipe"]
    reference = f"artifact:{manifest['digest']}"
    origin = f"source:{source['name']}"
    files = [
        {
            "type": "file",
            "bom-ref": f"file:{name}",
            "name": name,
            "hashes": [{"alg": "SHA-256", "content": row["sha256"]}],
        }
        for name, row in sorted(manifest["files"].items())
    ]
    model = {
        "type": "machine-learning-model",
        "bom-ref": reference,
        "name": recipe["name"],
        "version": manifest["digest"],
        "description": f"{source['name']} as {recipe['scheme']}",
        "properties": [
            {"name": f"quantflow:{key}", "value": str(value)}
            for key, value in (
                ("scheme", recipe["scheme"]),
                ("algorithm", recipe["resolved"]["algorithm"]),
            )
        ],
        "components": files,
    }
    parent = {
        "type": "machine-learning-model",
        "bom-ref": origin,
        "name": source["name"],
        "version": source["revision"] or "not recorded",
        "components": [
            {
                "type": "file",
                "bom-ref": f"{origin}/{name}",
                "name": name,
                "hashes": [{"alg": "SHA-256", "content": digest}],
            }
            for name, digest in sorted(source["files"].items())
        ],
    }
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": model},
        "components": [parent],
        "dependencies": [{"ref": reference, "dependsOn": [origin]}, {"ref": origin}],
    }
