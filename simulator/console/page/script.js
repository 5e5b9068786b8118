// Replaces the parts of the page that change with those that the server sends, sends forms without
// leaving the page, and pauses. All HTML comes from the server's templates, which escape it.
"use strict";

const kept = 100; // rows of the feed
const saidBy = text => { document.getElementById("said").textContent = text; };
const element = html => {
	const template = document.createElement("template");
	template.innerHTML = html;
	return template.content.firstElementChild;
};
const focusable = item => [...item.querySelectorAll("a, button")];

function replace(old, item) {
	const focus = focusable(old).indexOf(document.activeElement);
	old.replaceWith(item);
	if (focus >= 0) focusable(item)[focus]?.focus();
}

function arrange(list, ids, fresh) {
	const parent = document.getElementById(list);
	const wanted = new Set(ids);
	for (const child of [...parent.children]) if (!wanted.has(child.id)) child.remove();
	let at = parent.firstElementChild;
	for (const id of ids) {
		if (at?.id === id) {
			at = at.nextElementSibling;
			continue;
		}
		const item = fresh.get(id) || document.getElementById(id);
		if (item) parent.insertBefore(item, at);
	}
}

function show(update) {
	const fresh = new Map();
	for (const [id, html] of Object.entries(update.items || {})) {
		const old = document.getElementById(id), item = element(html);
		if (old?.isEqualNode(item)) continue; // the first update of a disk's page has all of it
		if (old) replace(old, item);
		else fresh.set(id, item);
	}
	for (const [list, ids] of Object.entries(update.lists || {})) arrange(list, ids, fresh);
	const feed = document.getElementById("feed"), rows = (update.rows || []).map(element);
	// The end of a change takes the place of its begin.
	for (const row of rows) document.getElementById(row.id)?.remove();
	feed.prepend(...rows);
	while (feed.rows.length > kept) feed.lastElementChild.remove();
}

let source, address = document.body.dataset.events;
function listen() {
	source = new EventSource(address);
	source.onmessage = event => {
		const next = new URL(address, location);
		next.searchParams.set("at", event.lastEventId);
		address = next;
		show(JSON.parse(event.data));
	};
	source.addEventListener("restart", () => location.reload());
	source.onopen = () => document.body.dataset.live = "yes";
	source.onerror = () => delete document.body.dataset.live;
}
if (address && !new URLSearchParams(location.search).has("pause")) listen();

document.getElementById("pause")?.addEventListener("click", event => {
	if (!address) return;
	event.preventDefault();
	if (source && source.readyState !== EventSource.CLOSED) source.close();
	else listen();
	const closed = source.readyState === EventSource.CLOSED;
	event.target.textContent = closed ? "Continue" : "Pause";
	saidBy(closed ? "The page is paused." : "");
});

document.addEventListener("submit", async event => {
	const form = event.target;
	if (form.method !== "post") return;
	event.preventDefault();
	try {
		const answer = await fetch(form.action, {method: "POST", headers: {Accept: "text/plain"},
			body: new URLSearchParams(new FormData(form, event.submitter))});
		saidBy(await answer.text());
	} catch (error) {
		saidBy("The rack does not answer: " + error.message);
	}
});
