//go:build openapi

package simulator

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
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
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

// schema is a rack's published document. The environment variable OXIDE_OPENAPI names its file.
type schema struct {
	*openapi3.T
	options *openapi3filter.Options
	// seen counts the answers checked, by operation and status.
	seen map[string]int
}

func loadSchema(t *testing.T) *schema {
	t.Helper()
	path := os.Getenv("OXIDE_OPENAPI")
	if path == "" {
		t.Fatal("OXIDE_OPENAPI is not set: name the file of a rack's OpenAPI document " +
			"(of a version from " + oldestVersion + " to " + apiVersion + ")")
	}
	doc, err := openapi3.NewLoader().LoadFromFile(path)
	simtest.NoError(t, err)
	if err := checkVersion(doc.Info.Version); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	for _, s := range doc.Components.Schemas {
		closeSchema(s)
	}
	// The schema distinguishes a name from an ID by the lookahead that closeSchema drops, and the
	// versions of addresses by formats that openapi3 does not check.
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

// closeSchema forbids fields that the schema does not have, and removes from its patterns the
// syntax that Go's regular expressions lack.
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

// watch returns a handler that passes requests on, and checks each request together with its
// answer.
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
		if item == nil || item.GetOperation(op.method) == nil {
			t.Errorf("the rack has no %s %s", op.method, path)
			return
		}
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
		for name, values := range answer.Header() {
			w.Header()[name] = values
		}
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

// TestAnswersMatchThePublishedSchema demands that every operation that the simulator serves
// answers according to the rack's published schema.
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
	server := must[*Server](t)(Open(t.Context(), Config{Dir: t.TempDir(),
		Role:      adminapi.RoleFleetAdmin,
		Log:       slog.New(slog.DiscardHandler),
		Instances: []InstanceSpec{{Name: "a"}, {Name: "b"}, {Name: "idle", Stopped: true}},
		Images: []ImageSpec{{Name: "silo", SizeBytes: 1 << 30},
			{Name: "project", Project: "default", SizeBytes: 1 << 30}}}))
	listener := httptest.NewServer(s.watch(t, server))
	t.Cleanup(func() {
		listener.Close()
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	})
	r := &rackServer{t: t, Server: server, Client: newClient(t, listener.URL), url: listener.URL}
	schemaStory(t, r)
	switchPorts(t, r)
	for name, op := range served {
		if s.seen[name] == 0 && name != "instance_serial_console" { // it needs an instance that runs
			t.Errorf("the story has no %s (%s) that succeeds", name, op.method)
		}
	}
}

// schemaStory calls every operation that the simulator serves, and sends many requests that are
// refused.
func schemaStory(t *testing.T, r *rackServer) {
	ctx := t.Context()
	must[*oxide.Ping](t)(r.Ping(ctx))
	must[*oxide.CurrentUser](t)(r.CurrentUserView(ctx))
	must[[]oxide.DeviceAccessToken](t)(r.CurrentUserAccessTokenListAllPages(ctx,
		oxide.CurrentUserAccessTokenListParams{}))
	must[*oxide.Utilization](t)(r.UtilizationView(ctx))
	must[[]oxide.Project](t)(r.ProjectListAllPages(ctx, oxide.ProjectListParams{}))
	must[*oxide.Project](t)(r.ProjectView(ctx, oxide.ProjectViewParams{Project: "default"}))

	r.disk("d")
	r.state("d")
	local := r.blank("l", 1)
	local.Body.DiskBackend.Value = &oxide.DiskBackendLocal{}
	must[*oxide.Disk](t)(r.DiskCreate(ctx, local))
	must[*oxide.Disk](t)(r.doAttach("a", "d"))
	sn := must[*oxide.Snapshot](t)(r.doSnapshot("s", "d"))
	r.snapshotState("s")
	must[[]oxide.Snapshot](t)(r.SnapshotListAllPages(ctx,
		oxide.SnapshotListParams{Project: "default"}))
	images := must[[]oxide.Image](t)(r.ImageListAllPages(ctx, oxide.ImageListParams{}))
	must[[]oxide.Image](t)(r.ImageListAllPages(ctx, oxide.ImageListParams{Project: "default"}))
	must[*oxide.Image](t)(r.ImageView(ctx, oxide.ImageViewParams{Image: "silo"}))
	must[*oxide.Disk](t)(r.DiskCreate(ctx, r.from(snapshotSource(sn.Id, true), "ro", 1)))
	must[*oxide.Disk](t)(r.DiskCreate(ctx, r.from(imageSource(images[0].Id, false), "i", 1)))
	must[*oxide.Disk](t)(r.DiskCreate(ctx, r.from(oxide.DiskSource{
		Value: &oxide.DiskSourceImportingBlocks{BlockSize: 4096}}, "import", 1)))
	if got := len(r.disks()); got != 5 {
		t.Errorf("there are %d disks", got)
	}
	importStory(t, r, "import")
	must[[]oxide.Disk](t)(r.InstanceDiskListAllPages(ctx,
		oxide.InstanceDiskListParams{Instance: "a", Project: "default"}))
	must[*oxide.Disk](t)(r.doDetach("a", "d"))

	must[[]oxide.Instance](t)(r.InstanceListAllPages(ctx,
		oxide.InstanceListParams{Project: "default"}))
	body := r.instanceBody("new")
	body.BootDisk = createdDisk("boot")
	body.Disks = []oxide.InstanceDiskAttachment{attachedDisk("d")}
	new := must[*oxide.Instance](t)(r.doCreate(body))
	r.awaitState("new", "running")
	must[*oxide.Instance](t)(r.change("reboot", "new"))
	r.awaitState("new", "running")
	r.doStop("new")
	policy := oxide.InstanceAutoRestartPolicyNever
	must[*oxide.Instance](t)(r.InstanceUpdate(ctx, oxide.InstanceUpdateParams{
		Instance: oxide.NameOrId(new.Id), Body: &oxide.InstanceUpdate{Ncpus: 4, Memory: 8 << 30,
			AutoRestartPolicy: &policy, EnableJumboFrames: oxide.NewPointer(false)}}))
	r.instance("new")
	must[*oxide.Instance](t)(r.change("start", "new"))
	r.awaitState("new", "running")
	r.doStop("new")
	neighbourLists(t, r)
	r.liveAll(func() *rackServer { return r })
	r.loadBalancer()
	r.project()
	r.secondInterface()
	r.rest()
	r.ipPools()
	r.subnetPools()
	r.fleetLists()
	for _, path := range []string{
		"/v1/anti-affinity-groups?project=default", "/v1/floating-ips?project=default",
		"/v1/instances/a/affinity-groups?project=default",
		"/v1/instances/a/multicast-groups?project=default",
		"/v1/system/hardware/racks", "/v1/system/silos/simulated/quotas",
		"/v1/system/utilization/silos", "/v1/system/utilization/silos/simulated",
		"/v1/system/silo-quotas", "/v1/me/access-tokens",
		"/v1/disks", "/v1/disks/nope?project=default", "/v1/vpcs?project=default",
	} {
		r.call("GET", path, "")
	}
	r.call("GET", "/v1/me", "", "Authorization", "")
	err := r.InstanceDelete(ctx,
		oxide.InstanceDeleteParams{Instance: "new", Project: "default"})
	if err != nil {
		t.Error(err)
	}
	err = r.SnapshotDelete(ctx, oxide.SnapshotDeleteParams{Snapshot: "s", Project: "default"})
	if err != nil {
		t.Error(err)
	}
	if err := r.doDelete("d"); err != nil {
		t.Error(err)
	}
}

// rest makes the calls that only records have and that no other story makes.
func (r *rackServer) rest() {
	for _, path := range []string{
		"/v1/ip-pools", "/v1/ip-pools/default-ipv6", "/v1/me/ssh-keys", "/v1/me/access-tokens",
		"/v1/internet-gateways?vpc=default&project=default",
		"/v1/vpc-subnets/default/network-interfaces?vpc=default&project=default",
		"/v1/vpc-firewall-rules?vpc=default&project=default", "/v1/system/silos/simulated",
	} {
		r.demand(200, "", "GET "+path)
	}
	for kind, param := range map[string]string{"affinity": "affinity-groups",
		"anti-affinity": "anti-affinity-groups"} {
		r.demand(201, "", fmt.Sprintf(`POST /v1/%s?project=default {"name":%q,"description":"",`+
			`"policy":"allow","failure_domain":"sled"}`, param, kind))
		one := fmt.Sprintf("/v1/%s/%s/members", param, kind)
		r.demand(201, "", fmt.Sprintf("POST %s/instance/idle?project=default", one))
		r.demand(200, "", fmt.Sprintf("GET %s/instance/idle?project=default", one))
		r.demand(200, "", fmt.Sprintf("GET %s?project=default", one))
		r.demand(200, "", fmt.Sprintf("GET /v1/instances/idle/%s?project=default", param))
		r.demand(204, "", fmt.Sprintf("DELETE %s/instance/idle?project=default", one))
	}
	r.demand(202, "", `POST /v1/instances/a/external-ips/ephemeral?project=default {}`)
	r.demand(204, "", `DELETE /v1/instances/a/external-ips/ephemeral?project=default&ip_version=v4`)
}

// importStory imports a disk, and makes an image of it.
func importStory(t *testing.T, r *rackServer, disk string) {
	err := errors.Join(r.doStartImport(disk), r.doImport(disk, 0, make([]byte, 4096)),
		r.doStopImport(disk), r.doFinalize(disk, "imported"))
	if err != nil {
		t.Error(err)
	}
	sn := must[*oxide.Snapshot](t)(r.SnapshotView(t.Context(),
		oxide.SnapshotViewParams{Snapshot: "imported", Project: "default"}))
	must[*oxide.Image](t)(r.ImageCreate(t.Context(), r.imageBody("made", "default", sn.Id)))
	must[*oxide.Image](t)(r.doPromote("made", "default"))
	must[*oxide.Image](t)(r.doDemote("made", "default"))
	err = r.ImageDelete(t.Context(), oxide.ImageDeleteParams{Image: "made", Project: "default"})
	if err != nil {
		t.Error(err)
	}
}

func attachedDisk(name string) oxide.InstanceDiskAttachment {
	return oxide.InstanceDiskAttachment{
		Value: &oxide.InstanceDiskAttachmentAttach{Name: oxide.Name(name)}}
}

func neighbourLists(t *testing.T, r *rackServer) {
	ctx := t.Context()
	must[[]oxide.InstanceNetworkInterface](t)(r.InstanceNetworkInterfaceListAllPages(ctx,
		oxide.InstanceNetworkInterfaceListParams{Instance: "a", Project: "default"}))
	must[*oxide.ExternalIpResultsPage](t)(r.InstanceExternalIpList(ctx,
		oxide.InstanceExternalIpListParams{Instance: "a", Project: "default"}))
	must[*oxide.ExternalSubnetResultsPage](t)(r.InstanceExternalSubnetList(ctx,
		oxide.InstanceExternalSubnetListParams{Instance: "a", Project: "default"}))
	must[[]oxide.SshKey](t)(r.InstanceSshPublicKeyListAllPages(ctx,
		oxide.InstanceSshPublicKeyListParams{Instance: "a", Project: "default"}))
	must[[]oxide.AntiAffinityGroup](t)(r.InstanceAntiAffinityGroupListAllPages(ctx,
		oxide.InstanceAntiAffinityGroupListParams{Instance: "a", Project: "default"}))
}
