"""Style sheet, script and icon of the dashboard: all that its pages load.

The script replaces each part of the page that has changed. It writes no markup of its own: it moves
nodes of a page that the server made.
"""

from __future__ import annotations

from elasticjob_cli.timeline_svg import STYLE as TIMELINE_STYLE

STYLE = (
    """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --raised: #f6f7f8; --ink: #202124; --soft: #5f6368; --line: #d9dce0;
  --link: #0b5cad; --good: #1e7a3c; --bad: #b3261e; --busy: #8a5a00; --done: #3c5a78;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #17191c; --raised: #202327; --ink: #e8eaed; --soft: #a4a9ae; --line: #3a3f45;
    --link: #8ab4f8; --good: #7fd197; --bad: #f2958e; --busy: #f0c36d; --done: #a9c3dd;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif;
}
header {
  display: flex; gap: .4rem 1rem; align-items: baseline; flex-wrap: wrap;
  padding: .7rem max(1rem, calc((100vw - 72rem) / 2)); border-bottom: 1px solid var(--line);
}
main { padding: .5rem max(1rem, calc((100vw - 72rem) / 2)) 3rem; }
.home { font-weight: 650; color: inherit; text-decoration: none; }
#live { margin-left: auto; font-size: .85rem; color: var(--good); }
#live::before { content: "\\25CF\\00A0"; }
#live.lost { color: var(--bad); }
a { color: var(--link); }
a:focus-visible, button:focus-visible, .scroll:focus-visible, .log:focus-visible {
  outline: 2px solid var(--link); outline-offset: 2px;
}
h1 { font-size: 1.5rem; margin: 1rem 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 1.8rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0 0 .2rem; }
p { margin: .3rem 0; overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.detail { display: block; font-size: .85rem; min-width: 14rem; overflow-wrap: anywhere; }
.note { border-left: 3px solid var(--busy); padding: .3rem .8rem; background: var(--raised); }
.explanation p { white-space: pre-wrap; max-width: 60rem; }
.badge {
  font-size: .8rem; font-weight: 600; padding: .1rem .55rem; border-radius: 1rem;
  border: 1px solid currentColor; vertical-align: middle; white-space: nowrap; color: var(--soft);
}
.good { color: var(--good); } .bad { color: var(--bad); }
.busy { color: var(--busy); } .done { color: var(--done); }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .6rem; }
.facts div { background: var(--raised); border-radius: .4rem; padding: .4rem .7rem; }
dt { color: var(--soft); font-size: .8rem; }
dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td {
  text-align: left; padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; white-space: nowrap;
}
td:has(.detail) { white-space: normal; min-width: 12rem; }
th { font-weight: 500; color: var(--soft); font-size: .85rem; }
#conditions td { white-space: normal; overflow-wrap: anywhere; }
article { border-left: 3px solid var(--bad); padding: .2rem 0 .2rem .9rem; margin: .6rem 0; }
.message { font-weight: 600; white-space: pre-wrap; }
pre {
  background: var(--raised); border-radius: .4rem; padding: .7rem .9rem; margin: .4rem 0;
  font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; overflow: auto; max-height: 28rem;
}
.log { white-space: pre-wrap; overflow-wrap: anywhere; }
.whole .log { max-height: calc(100vh - 13rem); min-height: 12rem; }
.pod { color: var(--link); } .mark { color: var(--busy); }
form { display: flex; gap: .6rem 1rem; flex-wrap: wrap; align-items: center; margin: .5rem 0; }
input, select, button {
  font: inherit; padding: .25rem .5rem; color: inherit; background: var(--paper);
  border: 1px solid var(--line); border-radius: .3rem;
}
input[type=number] { width: 6rem; }
summary { cursor: pointer; margin-top: 1.5rem; }
.picture svg { min-width: 760px; width: 100%; height: auto; display: block; }
@media (max-width: 640px) {
  body { font-size: 14px; }
  .minor { display: none; }
  .facts { grid-template-columns: repeat(2, 1fr); }
  pre { max-height: 20rem; font-size: 12px; }
}
"""
    + TIMELINE_STYLE
)

SCRIPT = """
"use strict";
const live = document.getElementById("live");
const period = 1000 * Number(live.dataset.seconds);

function atEnd(box) { return box.scrollHeight - box.scrollTop - box.clientHeight < 8; }

function focusable(part) {
  return [...part.querySelectorAll("a, button, input, select, summary, [tabindex]")];
}

function keepPlace(before, after) {
  const focused = document.activeElement;
  const place = focusable(before).indexOf(focused);
  const open = new Set([...before.querySelectorAll("details[open]")].map((one) => one.id));
  for (const one of after.querySelectorAll("details")) one.open = open.has(one.id);
  const boxes = [...before.querySelectorAll(".scroll, pre")];
  const places = boxes.map((box) => [box.scrollLeft, box.scrollTop, atEnd(box)]);
  before.replaceWith(after);
  [...after.querySelectorAll(".scroll, pre")].forEach((box, at) => {
    if (!places[at]) return;
    const [left, top, end] = places[at];
    box.scrollLeft = left;
    box.scrollTop = end && box.matches(".log") ? box.scrollHeight : top;
  });
  if (place < 0) return;
  const all = focusable(after);
  const next = all.find((one) => one.outerHTML === focused.outerHTML) || all[place];
  if (next) next.focus({ preventScroll: true });
}

function isEdited(part) {
  return part.contains(document.activeElement) && document.activeElement.matches("input, select");
}

function isSelected(part) {
  const chosen = document.getSelection();
  return !chosen.isCollapsed && chosen.getRangeAt(0).intersectsNode(part);
}

function update(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html").querySelector("main");
  const main = document.querySelector("main");
  const names = (parent) => [...parent.children].map((one) => one.id).join(" ");
  if (!fresh) return false;
  const parts = [...fresh.children];
  if (names(fresh) !== names(main)) {
    if (isEdited(main) || isSelected(main)) return true;
    sources = parts.map((part) => part.outerHTML);
    keepPlace(main, document.adoptNode(fresh));
    return true;
  }
  [...main.children].forEach((part, at) => {
    if (part.id === "choice" || isEdited(part) || isSelected(part)) return;
    const sent = sources[at];
    if (sent !== parts[at].outerHTML) {
      sources[at] = parts[at].outerHTML;
      keepPlace(part, document.adoptNode(parts[at]));
    }
  });
  return true;
}

let sources = [...document.querySelectorAll("main > *")].map((part) => part.outerHTML);

function lose(reason, ends) {
  const advice = ends ? "; reload the page to follow the jobs again" : "";
  live.textContent = `${reason}; shown is an earlier state${advice}`;
  live.className = "lost";
  return !ends;
}

// Returns false if there must be no further request. After the end of a server without
// encryption its port may be another program's, which must not get the viewer's password.
async function refresh() {
  let answer, text;
  try {
    answer = await fetch(location.href, { cache: "no-store", redirect: "error" });
    text = await answer.text();
  } catch (error) {
    return lose("no connection", location.protocol !== "https:");
  }
  if (!answer.ok) return lose(`${answer.status} ${answer.statusText}`, answer.status === 401);
  if (!update(text)) return lose("the answer is no page of jobs", false);
  live.textContent = "live";
  live.className = "";
  live.dataset.count = String(Number(live.dataset.count || 0) + 1);
  return true;
}

async function loop() {
  for (;;) {
    await new Promise((done) => setTimeout(done, period));
    if (!document.hidden && !(await refresh())) return;
  }
}

for (const box of document.querySelectorAll(".log")) box.scrollTop = box.scrollHeight;
loop();
"""

ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
    '<rect width="16" height="16" rx="3" fill="#1b6ca8"/>'
    '<path d="M3 8h3M10 8h3M6 5h4v6H6z" stroke="#fff" stroke-width="1.5" fill="none"/></svg>'
)
