package console

import (
	"html/template"
	"reflect"
	"slices"
)

// board has the changing parts of a page: lists of items, each an HTML element whose id is the
// item's. It numbers its changes, so that a page gets what has changed since it was rendered.
type board struct {
	last  int
	lists map[string]*list
	items map[string]*item
}

type list struct {
	ids     []string
	changed int
}

type item struct {
	part
	html    template.HTML
	changed int
}

// part is an item before it is rendered by a template. Equal models are rendered alike.
type part struct {
	id, template string
	model        any
}

// update has the lists whose order has changed, and the items that have. It is JSON for the script.
type update struct {
	Lists map[string][]string      `json:"lists,omitempty"`
	Items map[string]template.HTML `json:"items,omitempty"`
	Rows  []template.HTML          `json:"rows,omitempty"`
}

// put makes the board show these lists.
func (b *board) put(lists map[string][]part) error {
	if b.items == nil {
		b.lists, b.items = map[string]*list{}, map[string]*item{}
	}
	b.last++
	shown := map[string]bool{}
	for name, parts := range lists {
		var ids []string
		for _, p := range parts {
			ids = append(ids, p.id)
			shown[p.id] = true
			if old := b.items[p.id]; old != nil && reflect.DeepEqual(old.model, p.model) {
				continue
			}
			html, err := render(p.template, p.model)
			if err != nil {
				return err
			}
			b.items[p.id] = &item{p, html, b.last}
		}
		if old := b.lists[name]; old == nil || !slices.Equal(old.ids, ids) {
			b.lists[name] = &list{ids, b.last}
		}
	}
	for id := range b.items {
		if !shown[id] {
			delete(b.items, id)
		}
	}
	return nil
}

// since returns the changes after the one with that number.
func (b *board) since(last int) update {
	u := update{Lists: map[string][]string{}, Items: map[string]template.HTML{}}
	for name, l := range b.lists {
		if l.changed > last {
			u.Lists[name] = append([]string{}, l.ids...)
		}
	}
	for id, i := range b.items {
		if i.changed > last {
			u.Items[id] = i.html
		}
	}
	return u
}

// html returns the items of each list for a new page.
func (b *board) html() map[string][]template.HTML {
	all := map[string][]template.HTML{}
	for name, l := range b.lists {
		for _, id := range l.ids {
			all[name] = append(all[name], b.items[id].html)
		}
	}
	return all
}
