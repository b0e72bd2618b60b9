#!/usr/bin/env bash
# release.sh URL TAG: builds the wheel of a tag into dist/, for a repository at this URL. README's links and pictures become absolute, so that
# it renders on a package index, and the package gets its project URLs.
set -euo pipefail
cd "$(dirname "$0")/.."
url=${1:?URL of the repository} tag=${2:?tag} work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git archive HEAD | tar -x -C "$work"
absolute="s#(!\\[[^]]*\\]\\()([^):]+\\))#\\1$url/raw/$tag/\\2#g; s#(\\]\\()([^):\\#][^):]*\\))#\\1$url/blob/$tag/\\2#g"
sed -E -i "s#\(\.\./\.\./actions/#($url/actions/#g; $absolute" "$work/README.md"
sed -i "s#^\\[project.scripts\\]#[project.urls]\\nRepository = \"$url\"\\nDocumentation = \"$url/tree/$tag/docs\"\\nChangelog = \"$url/blob/$tag/CHANGELOG.md\"\\nIssues = \"$url/issues\"\\n\\n&#" "$work/pyproject.toml"
if [ -n "${ONLY_TEXT:-}" ]; then
  cat "$work/README.md" "$work/pyproject.toml"
  exit
fi
mkdir -p dist
"${PYTHON:-python3}" -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist "$work"
