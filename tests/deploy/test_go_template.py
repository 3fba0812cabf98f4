"""The template engine: what it renders, and what it refuses."""

from __future__ import annotations

import pytest

from tests.deploy.charts import TemplateError, Templates

DOT = {
    "name": "Ada",
    "none": None,
    "empty": "",
    "zero": 0,
    "yes": True,
    "list": ["a", "b"],
    "nothing": [],
    "map": {"y": {"z": 1}, "x": [1, 2]},
    "large": 1_000_000,
}


def rendered(source, **files):
    templates = Templates()
    for name, text in files.items():
        templates.add(name, text)
    templates.add("test", source)
    return templates.render("test", DOT)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ .name }} {{ .yes }} {{ .zero }}", "Ada true 0"),
        ('{{ "a\\"b" | quote }}', '"a\\"b"'),
        ("{{ .zero | quote }}", '"0"'),
        ("a\n  {{- .name -}}\n  b", "aAdab"),
        ("a {{- /* a comment, {{ */}} b", "a b"),
        ("a {{/* kept space */}} b", "a  b"),
        ("{{ -1 }}", "-1"),
        ("{{ if .empty }}a{{ else if .yes }}b{{ else }}c{{ end }}", "b"),
        ("{{ if .zero }}a{{ else if .none }}b{{ else }}c{{ end }}", "c"),
        ("{{ with .map.y }}{{ .z }}{{ $.name }}{{ end }}", "1Ada"),
        ("{{ with .empty }}a{{ else }}{{ .name }}{{ end }}", "Ada"),
        ("{{ with $x := .name }}{{ $x }}{{ . }}{{ end }}", "AdaAda"),
        ("{{ range .list }}<{{ . }}>{{ end }}", "<a><b>"),
        ("{{ range $i, $x := .list }}{{ if $i }},{{ end }}{{ $x }}{{ end }}", "a,b"),
        ("{{ range $k, $v := .map }}{{ $k }}{{ end }}", "xy"),
        ("{{ range $i := until (int 3) }}{{ $i }}{{ end }}", "012"),
        ("{{ range .nothing }}a{{ else }}none{{ end }}", "none"),
        ("{{ $x := 1 }}{{ if .yes }}{{ $x := 2 }}{{ $x }}{{ end }}{{ $x }}", "21"),
        ('{{ .empty | default "x" }}{{ .name | default "x" }}', "xAda"),
        ('{{ default "x" .none }}', "x"),
        ('{{ if and .yes (eq .name "Ada" "Bob") }}a{{ end }}', "a"),
        ('{{ if or .empty (eq .name "Bob") }}a{{ end }}', ""),
        ("{{ if or .name .missing }}a{{ end }}", "a"),
        ("{{ and .name .zero }}", "0"),
        ('{{ printf "%s-%d" .name 3 }}', "Ada-3"),
        ("{{ add .zero 15 1 }}", "16"),
        ("{{ if gt 2 1 }}a{{ end }}{{ if gt 1 1 }}b{{ end }}", "a"),
        ("x:{{ toYaml .map | nindent 2 }}", "x:\n  x:\n  - 1\n  - 2\n  'y':\n    z: 1"),
        ("{{ toYaml .name }}", "Ada"),
        ('{{ define "t" }}<{{ .a }}{{ end }}{{ include "t" (dict "a" .name) }}', "<Ada"),
        ('{{ include "other" . | quote }}', '"Ada"'),
        ('{{ required "needed" .name }}', "Ada"),
    ],
)
def test_source_renders(source, expected):
    assert rendered(source, other="{{ .name }}") == expected


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("\n{{ lower .name }}", r"^test:2: unknown function 'lower'"),
        ("{{ .nmae }}", "there is no 'nmae'"),
        ("{{ .name.first }}", "there is no 'first'"),
        ("{{ $x }}", "undefined variable"),
        ("{{ if .yes }}{{ $x := 1 }}{{ end }}{{ $x }}", "undefined variable"),
        ("{{ .none }}", "cannot print None"),
        ("{{ .list }}", "cannot print"),
        ("{{ .large }}", "cannot print 1000000"),
        ("{{ if .yes }}", "without `end`"),
        ("{{ if .yes }}a{{ else }}b", "without `end`"),
        ("{{ end }}", "without a block"),
        ("{{ with .yes }}a{{ else with .no }}b{{ end }}", "only `else`"),
        ("{{ (index .map).y }}", "unknown function|in parentheses"),
        ("{{ (.map).y }}", "in parentheses"),
        ("{{ (.name }}", "not closed"),
        ("{{ .name ) }}", "unexpected"),
        ("{{ .name .yes }}", "a function or one value"),
        ("{{ }}", "a function or one value"),
        ("{{ .a = 1 }}", "cannot parse"),
        ("{{ range .name }}a{{ end }}", "cannot iterate over 'Ada'"),
        ("{{ `raw` }}", "cannot parse"),
        ("{{ 1.5 }}", "a function or one value"),
        ("{{ define name }}{{ end }}", "a name in quotes"),
        ('{{ include "missing" . }}', "no template 'missing'"),
        ('{{ template "t" . }}', "unknown function 'template'"),
        ('{{ required "needed" .empty }}', r"function 'required': needed"),
        ('{{ fail "too many" }}', r"function 'fail': too many"),
        ("{{ quote .name .name }}", "function 'quote'"),
        ('{{ dict "a" }}', "function 'dict'"),
        ('{{ printf "%q" .name }}', "function 'printf'"),
    ],
)
def test_source_is_refused(source, problem):
    with pytest.raises(TemplateError, match=problem):
        rendered(source)
