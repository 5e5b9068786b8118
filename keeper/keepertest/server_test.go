package keepertest_test

import (
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
)

func TestARequestAfterCutDoesNotReachTheServer(t *testing.T) {
	server := keepertest.Serve(t, time.Now)
	for range 1000 {
		config, cut := server.Client("killed")
		client, err := rest.HTTPClientFor(config)
		if err != nil {
			t.Fatal(err)
		}
		cut()
		if response, err := client.Get(config.Host + "/api/v1/nodes"); err == nil {
			_ = response.Body.Close()
			t.Fatalf("the server answered %s", response.Status)
		}
	}
	if log := server.Log(); len(log) > 0 {
		t.Fatalf("the server got %d requests: %v …", len(log), log[0])
	}
}
