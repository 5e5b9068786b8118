package simulator

import (
	pages "html/template"
	"net/http"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// adminIndex lists the routes of the admin listener: as a page for a browser, and as JSON for
// every other client.
func adminIndex(w http.ResponseWriter, r *http.Request) {
	if !strings.Contains(r.Header.Get("Accept"), "text/html") {
		adminRespond(w, adminapi.Routes, nil)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	// The caller may be gone.
	_ = adminPage.Execute(w, struct {
		Host   string
		Routes []adminapi.Route
	}{r.Host, adminapi.Routes})
}

var adminPage = pages.Must(pages.New("index").Parse(`<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>A simulated rack</title>
<style>
body { font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em;
	color-scheme: light dark; }
td { padding: .3em 1em .3em 0; vertical-align: top; }
code, pre { font-size: 14px; }
pre { margin: 0; overflow-x: auto; }
</style>
<h1>A simulated rack: its administrator's side</h1>
<table>
{{- range .Routes}}
<tr><td><code>{{.Method}}</code><td>
{{- if eq .Method "GET"}}<a href="{{.Path}}"><code>{{.Path}}</code></a>
{{- else}}<code>{{.Path}}</code>{{end}}
<td>{{.Does}}
{{- if .Body}}<pre>curl -X {{.Method}} -d '{{.Body}}' http://{{$.Host}}{{.Path}}</pre>{{end}}
{{- end}}
</table>
</html>
`))
