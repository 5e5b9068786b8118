//go:build linux

package driver

import (
	"context"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
)

func TestTheDocumentationListsTheMetricsOfEachProcess(t *testing.T) {
	page := csitest.Got(os.ReadFile("../docs/metrics.md"))(t)
	onPage := map[string]string{}
	processOf := map[string]string{}
	row := regexp.MustCompile("(?m)^\\| `(\\w+)` \\| (\\w+) \\| (.*?) ?\\| .+? \\| (\\w+) " +
		"\\| .+ \\| .+ \\|$")
	for _, m := range row.FindAllStringSubmatch(string(page), -1) {
		labels := strings.Split(strings.ReplaceAll(m[3], "`", ""), ", ")
		onPage[m[1]], processOf[m[1]] = kindOf(m[2], labels), m[4]
	}
	for mode, processes := range map[string][]string{
		"controller": {"both", "controller"},
		"node":       {"both", "node"},
		"all":        {"both", "controller", "node"},
	} {
		t.Run(mode, func(t *testing.T) {
			want := maps.Clone(onPage)
			maps.DeleteFunc(want, func(name, _ string) bool {
				return !slices.Contains(processes, processOf[name])
			})
			if diff := cmp.Diff(want, registered(t, mode)); diff != "" {
				t.Errorf("docs/metrics.md (-) differs from the metrics of a process (+):\n%s", diff)
			}
		})
	}
}

// registered makes a call and a rack check, which give each metric a sample, and lists the metrics.
func registered(t *testing.T, mode string) map[string]string {
	t.Helper()
	p := assembled(t, mode)
	info := &grpc.UnaryServerInfo{FullMethod: "/csi.v1.Identity/Probe"}
	_, err := p.metrics.intercept(t.Context(), nil, info,
		func(context.Context, any) (any, error) { return nil, nil })
	must(t, err)
	if p.health != nil && !p.health.check(t.Context()) {
		t.Fatalf("the check of the rack fails: %v", p.health.now().fault)
	}
	families := csitest.Got(p.metrics.registry.Gather())(t)
	found := map[string]string{}
	for _, family := range families {
		var labels []string
		for _, pair := range family.GetMetric()[0].GetLabel() {
			labels = append(labels, pair.GetName())
		}
		found[family.GetName()] = kindOf(strings.ToLower(family.GetType().String()), labels)
	}
	described := make(chan *prometheus.Desc)
	go func() {
		defer close(described)
		p.metrics.registry.Describe(described)
	}()
	name := regexp.MustCompile(`fqName: "(\w+)"`)
	for desc := range described {
		of := name.FindStringSubmatch(desc.String())[1]
		if strings.HasPrefix(of, "oxide_csi_") && found[of] == "" && p.health != nil {
			t.Errorf("%s has no sample: this test has to give it one", of) // in mode node some have none
		}
	}
	maps.DeleteFunc(found, func(name, _ string) bool {
		return strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_")
	})
	return found
}

func TestUnknownHTTPStatusesShareOneSeries(t *testing.T) {
	m := newMetrics()
	for status := range 1000 {
		m.request(httptest.NewRequest(http.MethodGet, "/v1/disks", nil),
			&http.Response{StatusCode: status}, time.Second)
	}
	families := csitest.Got(m.registry.Gather())(t)
	for _, family := range families {
		if n := len(family.GetMetric()); family.GetName() == "oxide_csi_rack_request_seconds" &&
			n != len(knownStatuses)+1 {
			t.Errorf("%d series, want one for each of %v and one for the others", n, knownStatuses)
		}
	}
}

func kindOf(kind string, labels []string) string {
	slices.Sort(labels)
	return kind + " {" + strings.Join(labels, ",") + "}"
}

func assembled(t *testing.T, mode string) *plugin {
	t.Helper()
	url := racktest.At(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Request-Id", "r-1")
		_, _ = io.WriteString(w, map[string]string{
			racktest.ViewProject: racktest.ProjectOf(), racktest.ViewUser: racktest.UserOf(racktest.Silo),
			"GET /v1/me/access-tokens": racktest.PageOf("", racktest.JSON(map[string]any{
				"id": racktest.Numbered(1), "time_created": "2026-01-01T00:00:00Z",
				"time_expires": "2036-01-01T00:00:00Z",
			})),
		}["GET "+r.URL.Path])
	})
	sysfs := t.TempDir()
	must(t, os.Mkdir(filepath.Join(sysfs, "block"), 0o755))
	config := csitest.Got(ParseConfig(nil, goodEnv(map[string]string{"OXIDE_HOST": url,
		"OXIDE_MODE": mode, "OXIDE_SYSFS_ROOT": sysfs, "OXIDE_STATE_DIR": t.TempDir(),
		"OXIDE_INSTANCE_ID": racktest.Numbered(2)}), io.Discard))(t)
	p := &plugin{config: config, metrics: newMetrics(), log: slog.New(slog.DiscardHandler)}
	t.Cleanup(p.close)
	csitest.Got(p.assemble())(t)
	return p
}
