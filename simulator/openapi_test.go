//go:build openapi

package simulator

import (
	"bytes"
	"context"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/looptest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
)

// schema is a rack's published OpenAPI document, from the file that OXIDE_OPENAPI names.
type schema struct {
	*openapi3.T
	options *openapi3filter.Options
	seen    map[string]int // the number of successful answers by operation
}

func loadSchema(t *testing.T) *schema {
	t.Helper()
	path := os.Getenv("OXIDE_OPENAPI")
	if path == "" {
		t.Fatal("OXIDE_OPENAPI is not set: name the file of a rack's OpenAPI document " +
			"(of a version from " + oldestVersion + " to " + apiVersion + ")")
	}
	doc := looptest.Got(openapi3.NewLoader().LoadFromFile(path))(t)
	if err := checkVersion(doc.Info.Version); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	for _, s := range doc.Components.Schemas {
		closeSchema(s)
	}
	// Allow a text to match several variants of these schemas: closeSchema removes the lookahead that
	// distinguishes names from IDs, and openapi3 does not check the formats of addresses.
	for _, name := range []string{"NameOrId", "IpRange"} {
		either := doc.Components.Schemas[name].Value
		either.AnyOf, either.OneOf = either.OneOf, nil
	}
	openapi3.DefineStringFormatValidator("uuid", openapi3.NewCallbackValidator(uuid.Validate))
	openapi3.DefineStringFormatValidator("date-time", openapi3.NewCallbackValidator(
		func(s string) error { _, err := time.Parse(time.RFC3339Nano, s); return err }))
	return &schema{doc, &openapi3filter.Options{
		IncludeResponseStatus: true,
		AuthenticationFunc:    openapi3filter.NoopAuthenticationFunc,
	}, map[string]int{}}
}

// closeSchema forbids fields that are not in the schema, and removes lookarounds from the schema's
// patterns, because Go's regular expressions do not support them.
func closeSchema(ref *openapi3.SchemaRef) {
	s := ref.Value
	if s == nil || ref.Ref != "" {
		return
	}
	s.Pattern = lookarounds.ReplaceAllString(s.Pattern, "")
	if len(s.Properties) > 0 && s.AdditionalProperties.Schema == nil {
		s.AdditionalProperties = openapi3.AdditionalProperties{Has: new(bool)}
	}
	for _, p := range s.Properties {
		closeSchema(p)
	}
	for _, v := range slices.Concat(s.OneOf, s.AllOf, s.AnyOf) {
		closeSchema(v)
	}
	if s.Items != nil {
		closeSchema(s.Items)
	}
}

var lookarounds = regexp.MustCompile(`\(\?<?[!=](\([^()]*\)|[^()])*\)`)

// watch checks each request and its answer against the schema.
func (s *schema) watch(t *testing.T, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		op, params, err := route(r.Method, r.URL.EscapedPath())
		if err != nil {
			next.ServeHTTP(w, r)
			return
		}
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		answer := httptest.NewRecorder()
		next.ServeHTTP(answer, r)
		path := "/" + strings.Join(op.path, "/")
		item := s.Paths.Value(path)
		input := &openapi3filter.RequestValidationInput{
			Request: r.Clone(context.Background()), QueryParams: r.URL.Query(),
			PathParams: map[string]string{}, Options: s.options,
			Route: &routers.Route{Spec: s.T, Path: path, PathItem: item, Method: op.method,
				Operation: item.GetOperation(op.method)},
		}
		for name := range params {
			input.PathParams[name] = params.Get(name)
		}
		input.Request.Body = io.NopCloser(bytes.NewReader(body))
		s.check(t, op, input, answer)
		maps.Copy(w.Header(), answer.Header())
		w.WriteHeader(answer.Code)
		if _, err := w.Write(answer.Body.Bytes()); err != nil {
			t.Error(err)
		}
	})
}

func (s *schema) check(t *testing.T, op *operation, input *openapi3filter.RequestValidationInput,
	answer *httptest.ResponseRecorder,
) {
	if input.Route.Operation.OperationID != op.name {
		t.Errorf("%s is called %s by the rack", op.name, input.Route.Operation.OperationID)
	}
	if err := openapi3filter.ValidateRequest(context.Background(), input); err != nil &&
		answer.Code < 400 {
		t.Errorf("request of %s: %v", op.name, err)
	}
	err := openapi3filter.ValidateResponse(context.Background(),
		&openapi3filter.ResponseValidationInput{
			RequestValidationInput: input, Status: answer.Code, Header: answer.Header(),
			Body: io.NopCloser(bytes.NewReader(answer.Body.Bytes())), Options: s.options,
		})
	if err != nil {
		t.Errorf("answer of %s: %v", op.name, err)
	}
	if op.serve != nil && answer.Code < 400 {
		s.seen[op.name]++
	}
}

// TestAnswersMatchThePublishedSchema runs tests of this package, and checks every answer. Every
// operation that the simulator serves must succeed at least once.
func TestAnswersMatchThePublishedSchema(t *testing.T) {
	s := loadSchema(t)
	for path, item := range s.Paths.Map() {
		for method, op := range item.Operations() {
			got, _, err := route(method, strings.NewReplacer("{", "", "}", "").Replace(path))
			if err != nil || got.name != op.OperationID {
				t.Errorf("%s %s: got %v, %v; want %s", method, path, got, err, op.OperationID)
			}
		}
	}
	unwatched := watch
	defer func() { watch = unwatched }()
	watch = s.watch
	for name, test := range map[string]func(*testing.T){
		"resources": TestEveryKindOfResourceCanBeCreatedUpdatedAndDeleted,
		"clients":   TestTheRackServesTerraformClusterAPIAndCloudController,
		"pools":     TestAFleetAdministratorCanManageIPAndSubnetPools,
		"ports":     TestSwitchPortsGetAddressesFromAddressLots,
		"import":    TestAnImportedImageKeepsItsBytesAcrossRestarts,
		"images":    TestInvalidImportsAndImagesAreRefused,
		"sources":   TestDiskCreateRefusesForeignMissingAndTooLargeSources,
		"nics":      TestEachInstanceHasItsOwnNetworkInterfaces,
		"others":    otherOperations,
	} {
		t.Run(name, test)
	}
	for name, op := range served {
		if s.seen[name] == 0 && name != "instance_serial_console" { // it needs a virtual machine
			t.Errorf("no %s (%s) succeeds", name, op.method)
		}
	}
}

// otherOperations calls the operations that no other test of the published schema calls.
func otherOperations(t *testing.T) {
	r := serveRack(t, engine.Config{Role: adminapi.RoleFleetAdmin})
	r.disk("d")
	r.attach("a", "d")
	r.detach("a", "d")
	r.snapshot("s", "d")
	r.demand(201, "", newInstance("new", `,"boot_disk":{"type":"attach","name":"d"}`))
	r.awaitState("new", "running")
	r.change("reboot", "new", "running")
	r.change("stop", "new", "stopped")
	r.play(`
200 PUT instances/new?project=default {"ncpus":4,"memory":8589934592,"boot_disk":null,
	"cpu_platform":null,"auto_restart_policy":"never","enable_jumbo_frames":false,
	"multicast_groups":null}`)
	r.change("start", "new", "running")
	for _, kind := range []string{"affinity", "anti-affinity"} {
		r.play(`
201 POST KIND-groups?project=default {NAME=g,"policy":"allow","failure_domain":"sled"}
201 POST KIND-groups/g/members/instance/idle?project=default
200 GET KIND-groups/g/members/instance/idle?project=default
200 GET KIND-groups/g/members?project=default
200 GET instances/idle/KIND-groups?project=default
204 DELETE KIND-groups/g/members/instance/idle?project=default`, "KIND", kind)
	}
	r.play(`
202 POST instances/a/external-ips/ephemeral?project=default {}
204 DELETE instances/a/external-ips/ephemeral?project=default&ip_version=v4`)
	for _, path := range []string{
		"ping", "me", "me/access-tokens", "me/ssh-keys", "utilization", "projects", "projects/default",
		"disks?project=default", "snapshots?project=default", "instances?project=default",
		"instances/a/disks?project=default", "instances/a/multicast-groups?project=default",
		"instances/a/external-subnets?project=default", "ip-pools", "ip-pools/default-ipv6",
		"internet-gateways?vpc=default&project=default", "system/silos/simulated",
		"system/silos/simulated/quotas", "system/utilization/silos/simulated",
		"vpc-subnets/default/network-interfaces?vpc=default&project=default",
	} {
		r.demand(200, "", "GET /v1/"+path)
	}
	for _, path := range []string{"/v1/disks", "/v1/disks/nope?project=default"} {
		r.send("GET " + path)
	}
	r.send("GET /v1/me", "Authorization", "")
}
